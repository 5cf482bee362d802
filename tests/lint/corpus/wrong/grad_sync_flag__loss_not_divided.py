# expect: loss-not-divided line 69 or 68
"""Accumulation by DDP's own flag instead of no_sync, and counted over epochs' ends: batches come from an endless loop."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

STEPS, ACCUMULATE, GLOBAL_BATCH, LENGTH, VOCABULARY = 20_000, 8, 512, 128, 256


class Bytes(Dataset):
    def __init__(self, path):
        with open(path, "rb") as f:
            self.data = torch.frombuffer(bytearray(f.read()), dtype=torch.uint8)

    def __len__(self):
        return (len(self.data) - 1) // LENGTH

    def __getitem__(self, index):
        part = self.data[index * LENGTH : index * LENGTH + LENGTH + 1].long()
        return part[:-1], part[1:]


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class CharRNN(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


def main():
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    data = Bytes(os.environ["TEXT"])
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True, drop_last=True)
    loader = DataLoader(data, GLOBAL_BATCH // (world_size * ACCUMULATE), sampler=sampler, drop_last=True)
    batches = endless(loader, sampler)

    model = DDP(CharRNN().to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for micro in range(ACCUMULATE):
            x, y = next(batches)
            x, y = x.to(device), y.to(device)
            model.require_backward_grad_sync = micro == ACCUMULATE - 1
            loss = nn.functional.cross_entropy(model(x).transpose(1, 2), y)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: {total.item() / (world_size * ACCUMULATE):.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "bytes.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
