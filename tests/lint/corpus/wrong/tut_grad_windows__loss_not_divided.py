# expect: loss-not-divided line 66 or 65 or 70
# Part 3 of the course: large effective batches on small GPUs.
# Run:  torchrun --standalone --nproc_per_node=2 tut_grad_windows.py
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
RANK = dist.get_rank()
WORLD = dist.get_world_size()
LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)

EPOCHS = 10
MICRO = 16          # images in one forward on one GPU
WINDOW = 8          # forwards for one update
# 0.05 was tuned for updates of 128 images
LR = 0.05 * (MICRO * WINDOW * WORLD) / 128
torch.manual_seed(1234 + RANK)

# the first process of each machine downloads, the rest wait for it
if LOCAL == 0:
    torchvision.datasets.STL10("stl10", split="train", download=True)
dist.barrier()

normalize = T.Normalize((0.447, 0.440, 0.407), (0.260, 0.257, 0.271))
train_set = torchvision.datasets.STL10(
    "stl10", split="train",
    transform=T.Compose([T.RandomCrop(96, padding=8), T.RandomHorizontalFlip(), T.ToTensor(), normalize]))
test_set = torchvision.datasets.STL10(
    "stl10", split="test", transform=T.Compose([T.ToTensor(), normalize]))

order = DistributedSampler(train_set, shuffle=True, drop_last=True)
train_batches = DataLoader(train_set, batch_size=MICRO, sampler=order, num_workers=2, pin_memory=True, drop_last=True)
my_test = Subset(test_set, range(RANK, len(test_set), WORLD))
test_batches = DataLoader(my_test, batch_size=200, num_workers=2)

model = torchvision.models.resnet18(num_classes=10).cuda()
ddp = DistributedDataParallel(model, device_ids=[LOCAL])
optimizer = torch.optim.SGD(ddp.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)

n_batches = len(train_batches)

for epoch in range(EPOCHS):
    order.set_epoch(epoch)
    ddp.train()
    loss_sum = torch.zeros((), device="cuda")
    for step, (images, labels) in enumerate(train_batches):
        images = images.cuda(non_blocking=True)
        labels = labels.cuda(non_blocking=True)
        is_last = step + 1 == n_batches
        update_now = (step + 1) % WINDOW == 0 or is_last

        # talk to the other GPUs only on the batch that ends a window
        quiet = contextlib.nullcontext() if update_now else ddp.no_sync()
        with quiet:
            loss = F.cross_entropy(ddp(images), labels)
            loss.backward()
        loss_sum += loss.detach()

        if update_now:
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    counts = torch.zeros(2, device="cuda")
    with torch.no_grad():
        for images, labels in test_batches:
            predicted = model(images.cuda()).argmax(dim=1)
            counts[0] += (predicted == labels.cuda()).sum()
            counts[1] += labels.shape[0]
    dist.all_reduce(counts)
    dist.all_reduce(loss_sum)
    if RANK == 0:
        mean_loss = loss_sum.item() / (n_batches * WORLD)
        print(f"epoch {epoch + 1}: train loss {mean_loss:.3f}, test accuracy {counts[0].item() / counts[1].item():.3f}")

if RANK == 0:
    torch.save(model.state_dict(), "stl10_resnet18.pth")
dist.destroy_process_group()
