# expect: sampler-other-dataset line 39 or 38
"""Rank 0 validates and decides; its decision is broadcast so that all leave the loop in the same epoch."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def split(path):
    arrays = torch.load(path, map_location="cpu", weights_only=True)
    dataset = TensorDataset(arrays["x"], arrays["y"])
    generator = torch.Generator().manual_seed(0)  # one split on all ranks
    return random_split(dataset, [0.9, 0.1], generator=generator)


def validate(net, loader, device):
    net.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for x, y in loader:
            total += nn.functional.mse_loss(net(x.to(device)), y.to(device), reduction="sum")
    net.train()
    return total.item() / len(loader.dataset)


def main(path="regression.pt", patience=5, max_epochs=200, batch_size=1024):
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(10 + rank)
    train_set, val_set = split(path)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set.dataset, batch_size=batch_size // world_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=4096)

    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 1)).to(device)
    model = DDP(net, device_ids=[device.index])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best, bad_epochs = float("inf"), 0
    for epoch in range(max_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()

        stop = torch.zeros(1, dtype=torch.int32, device=device)
        if rank == 0:
            loss = validate(model.module, val_loader, device)
            print(f"epoch {epoch}: validation loss {loss:.5f}")
            if loss < best:
                best, bad_epochs = loss, 0
                torch.save(model.module.state_dict(), "best.pt")
            else:
                bad_epochs += 1
            stop += int(bad_epochs >= patience)
        dist.broadcast(stop, src=0)
        if stop.item():
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
