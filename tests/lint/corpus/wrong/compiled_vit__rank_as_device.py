# expect: rank-as-device line 29 or 55
import os

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import v2

CONFIG = dict(epochs=100, global_batch=1024, lr=1e-3, warmup=5, weight_decay=0.1)


def log(rank, *words):
    if rank == 0:
        print(*words, flush=True)


def warm_cosine(optimizer, epochs, warmup):
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, warmup)
    second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs - warmup)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [warmup])


def train(root):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group(backend="nccl", rank=rank, world_size=world_size)
    torch.manual_seed(42 + rank)
    torch.set_float32_matmul_precision("high")

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(224),
            v2.RandAugment(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        ]
    )
    dataset = torchvision.datasets.ImageFolder(root, transform)
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True, seed=42)
    loader = DataLoader(
        dataset,
        batch_size=CONFIG["global_batch"] // world_size,
        sampler=sampler,
        num_workers=8,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    model = torchvision.models.vit_b_16(dropout=0.1).cuda()
    model = DDP(torch.compile(model), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"], weight_decay=CONFIG["weight_decay"])
    scheduler = warm_cosine(optimizer, CONFIG["epochs"], CONFIG["warmup"])
    criterion = nn.CrossEntropyLoss()

    for epoch in range(CONFIG["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device="cuda")
        for images, labels in loader:
            images = images.cuda(non_blocking=True)
            labels = labels.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        scheduler.step()
        dist.all_reduce(total)
        mean = total.item() / (world_size * len(loader))
        log(rank, f"epoch {epoch}: loss {mean:.4f} lr {optimizer.param_groups[0]['lr']:.2e}")
    if rank == 0:
        torch.save(model.module._orig_mod.state_dict(), "vit.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(os.environ["IMAGENET_TRAIN"])
