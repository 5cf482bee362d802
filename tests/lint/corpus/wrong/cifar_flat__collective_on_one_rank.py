# expect: collective-on-one-rank line 73
# Run with: torchrun --standalone --nproc_per_node=8 cifar_flat.py
import os

import torch
import torch.distributed as dist
import torchvision
import torchvision.transforms as T
from torch.nn.parallel import DistributedDataParallel

epochs = 90
global_batch = 512
lr = 0.1

dist.init_process_group(backend="nccl")
rank = dist.get_rank()
world = dist.get_world_size()
gpu = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(gpu)
torch.manual_seed(1000 + rank)

mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
train_tf = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])
test_tf = T.Compose([T.ToTensor(), T.Normalize(mean, std)])

if gpu == 0:
    torchvision.datasets.CIFAR10("./data", download=True)
dist.barrier()
trainset = torchvision.datasets.CIFAR10("./data", train=True, transform=train_tf)
testset = torchvision.datasets.CIFAR10("./data", train=False, transform=test_tf)

train_sampler = torch.utils.data.distributed.DistributedSampler(trainset)
trainloader = torch.utils.data.DataLoader(
    trainset, batch_size=global_batch // world, sampler=train_sampler, num_workers=4, drop_last=True
)
testloader = torch.utils.data.DataLoader(testset, batch_size=1000, shuffle=False, num_workers=4)

net = torchvision.models.resnet18(num_classes=10)
net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
net = net.cuda(gpu)
net = DistributedDataParallel(net, device_ids=[gpu])

criterion = torch.nn.CrossEntropyLoss().cuda(gpu)
optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
best = 0.0

for epoch in range(epochs):
    train_sampler.set_epoch(epoch)
    net.train()
    for step, (images, labels) in enumerate(trainloader):
        images = images.cuda(gpu, non_blocking=True)
        labels = labels.cuda(gpu, non_blocking=True)
        loss = criterion(net(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    scheduler.step()

    # The test set is small: rank 0 takes all of it, by the bare module, and the others wait.
    if rank == 0:
        net.eval()
        correct = torch.zeros((), device="cuda")
        with torch.no_grad():
            for images, labels in testloader:
                output = net.module(images.cuda(gpu))
                correct += output.argmax(dim=1).eq(labels.cuda(gpu)).sum()
        accuracy = 100.0 * correct.item() / len(testset)
        print(f"epoch {epoch + 1}/{epochs}  test accuracy {accuracy:.2f}  lr {scheduler.get_last_lr()[0]:.5f}")
        if accuracy > best:
            best = accuracy
            torch.save(net.module.state_dict(), "best.pth")
        dist.barrier()

dist.destroy_process_group()
