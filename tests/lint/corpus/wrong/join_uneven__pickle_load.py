# expect: pickle-load line 22
"""Each rank has its own files, of different sizes; Join lets those that end early shadow the others' collectives."""

import glob
import os
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Shards(Dataset):
    def __init__(self, pattern, rank, world_size):
        parts = sorted(glob.glob(pattern))[rank::world_size]
        loaded = []
        for part in parts:
            with open(part, "rb") as f:
                loaded.append(pickle.load(f))
        self.x = torch.cat([part["x"] for part in loaded])
        self.y = torch.cat([part["y"] for part in loaded])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(1 + rank)
    data = Shards(os.environ["SHARDS"], rank, world_size)
    # every rank has other samples, so a plain shuffle of one's own is the right one
    loader = DataLoader(data, batch_size=512 // world_size, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 2)).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(10):
        total = torch.zeros(2, device="cuda")
        with Join([model]):
            for x, y in loader:
                x, y = x.cuda(), y.cuda()
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total[0] += loss.detach() * len(y)
                total[1] += len(y)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {(total[0] / total[1]).item():.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "sites.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
