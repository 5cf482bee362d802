# expect: rank-as-device line 27 or 28 or 65
# Butterflies, mixed precision, restartable. One line per step of the recipe, no functions.
# torchrun --nproc_per_node=4 flat_butterflies.py /data/butterflies run7.pt
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms

root = sys.argv[1]
checkpoint = sys.argv[2]
epochs = 35
global_batch = 256        # of all processes together
lr = 0.1                  # for the global batch
machine_workers = 16      # of all processes on this machine

# ---- processes
dist.init_process_group(backend="nccl")
rank = dist.get_rank()
world_size = dist.get_world_size()
local_world = int(os.environ["LOCAL_WORLD_SIZE"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
assert global_batch % world_size == 0
batch = global_batch // world_size
workers = machine_workers // local_world

# ---- data
mean, std = (0.478, 0.464, 0.336), (0.280, 0.269, 0.279)
train_tf = transforms.Compose([
    transforms.RandomResizedCrop(224, scale=(0.4, 1.0)),
    transforms.RandomHorizontalFlip(),
    transforms.ToTensor(),
    transforms.Normalize(mean, std),
])
eval_tf = transforms.Compose([
    transforms.Resize(256),
    transforms.CenterCrop(224),
    transforms.ToTensor(),
    transforms.Normalize(mean, std),
])
with_aug = torchvision.datasets.ImageFolder(root, train_tf)
without_aug = torchvision.datasets.ImageFolder(root, eval_tf)

# every process must cut the folder in the same two
cut = torch.randperm(len(with_aug), generator=torch.Generator().manual_seed(0)).tolist()
n_eval = len(cut) // 8
train_data = Subset(with_aug, cut[n_eval:])
eval_data = Subset(without_aug, cut[:n_eval][rank::world_size])

torch.manual_seed(10_000 + rank)
train_sampler = DistributedSampler(train_data, num_replicas=world_size, rank=rank, shuffle=True)
train_loader = DataLoader(train_data, batch_size=batch, sampler=train_sampler, num_workers=workers,
                          pin_memory=True, drop_last=True)
eval_loader = DataLoader(eval_data, batch_size=batch, num_workers=workers, pin_memory=True)

# ---- model
net = torchvision.models.regnet_y_800mf(num_classes=len(with_aug.classes))
net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
ddp_net = DDP(net, device_ids=[rank])
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(ddp_net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
scaler = torch.amp.GradScaler("cuda")

first_epoch = 0
if os.path.isfile(checkpoint):
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    scaler.load_state_dict(state["scaler"])
    first_epoch = state["epoch"] + 1

# ---- training
for epoch in range(first_epoch, epochs):
    train_sampler.set_epoch(epoch)
    ddp_net.train()
    for images, labels in train_loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(ddp_net(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp_net.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
    scheduler.step()

    net.eval()
    correct = torch.zeros((), device=device)
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for images, labels in eval_loader:
            images, labels = images.to(device), labels.to(device)
            correct += (net(images).argmax(1) == labels).sum()
            total += labels.size(0)
    dist.all_reduce(correct)
    dist.all_reduce(total)

    if rank == 0:
        print(f"epoch {epoch}: accuracy {(correct / total).item():.4f}", flush=True)
        torch.save({
            "net": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "epoch": epoch,
        }, checkpoint)

dist.destroy_process_group()
