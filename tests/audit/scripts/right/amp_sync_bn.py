"""Mixed precision on GPUs: SyncBatchNorm before DDP, gradients unscaled before they are clipped, a rate per update."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, LR = 2, 64, 0.05


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def make_set(count):
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(images, images.mean((1, 2, 3)).mul(60).round().long().clamp(-4, 5) + 4)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    world_size = dist.get_world_size()
    device = torch.device("cuda", local_rank)

    train_set = make_set(256)
    sampler = DistributedSampler(train_set, seed=5)
    loader = DataLoader(train_set, batch_size=BATCH // world_size, sampler=sampler, pin_memory=True, drop_last=True)
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(device)
    model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=EPOCHS * len(loader))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda"):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: last batch's loss {mean.item() / world_size:.4f}")
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "amp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
