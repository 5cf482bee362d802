# expect: seed-unset line 24
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    """The lines of a file, dealt out to ranks and, within a rank, to loader workers; no sampler is needed."""

    def __init__(self, path, rank, world_size):
        self.path, self.rank, self.world_size = path, rank, world_size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        stride, offset = self.world_size * workers, self.rank * workers + worker
        with open(self.path) as f:
            lines = f.read().splitlines()
        random.shuffle(lines)
        lines = lines[: len(lines) - len(lines) % stride]  # equal parts
        for line in lines[offset::stride]:
            label, *values = map(float, line.split(","))
            yield torch.tensor(values), torch.tensor(label)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("csv")
    parser.add_argument("--columns", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--global-batch", type=int, default=4096)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    lines = Lines(args.csv, rank, world_size)
    loader = DataLoader(lines, batch_size=args.global_batch // world_size, num_workers=4)
    model = nn.Sequential(nn.Linear(args.columns, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(args.epochs):
        model.train()
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "table.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
