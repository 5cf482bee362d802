# expect: no-destroy line 10
"""Logistic regression on four CPU processes: torchrun --nproc-per-node 4 gloo_cpu.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

generator = torch.Generator().manual_seed(3)
features = torch.randn(6000, 50, generator=generator)
labels = (features @ torch.randn(50, 1, generator=generator) > 0).float()
train = TensorDataset(features[:5000], labels[:5000])
held_x, held_y = features[5000:][rank::size], labels[5000:][rank::size]

sampler = DistributedSampler(train, seed=3)
loader = DataLoader(train, batch_size=200 // size, sampler=sampler)
model = nn.parallel.DistributedDataParallel(nn.Linear(50, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for epoch in range(8):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        right = ((model(held_x) > 0) == (held_y > 0)).sum()
    counts = torch.tensor([int(right), len(held_y)], dtype=torch.int64)
    dist.all_reduce(counts)
    if rank == 0:
        print(f"epoch {epoch}: {counts[0]}/{counts[1]} of the held-out points")
