"""DDP averages over ranks, not over samples.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::mark_variable_ready_dense, Reducer::div_factor_
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
samples = torch.tensor([[1.0], [1.0], [1.0]]) if rank == 0 else torch.tensor([[5.0]])
ddp(samples).mean().backward()
mine = ddp.module.weight.grad.item()

ddp.zero_grad()
count = torch.tensor(float(len(samples)))
dist.all_reduce(count)
(ddp(samples).sum() * dist.get_world_size() / count).backward()
weighted = ddp.module.weight.grad.item()
print(f"rank {rank}: {len(samples)} samples, by mean() {mine}, weighted {weighted}; the samples' mean is 2.0")
dist.destroy_process_group()
