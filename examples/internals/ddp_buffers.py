"""Rank 0's buffers are copied to all before a forward that trains; after the last one, ranks differ.

Reads:
torch/nn/parallel/distributed.py: DistributedDataParallel._check_sync_bufs_pre_fwd
torch/nn/parallel/distributed.py: DistributedDataParallel._sync_buffers
torch/nn/parallel/distributed.py: DistributedDataParallel.will_sync_module_buffers
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

ddp = DistributedDataParallel(nn.BatchNorm1d(1, momentum=0.5))
for step in range(3):
    ddp(torch.full((2, 1), rank + 1.0)).sum().backward()
    print(f"rank {rank}: running mean after step {step}: {ddp.module.running_mean.item()}")
ddp.eval()
with torch.no_grad():
    ddp(torch.ones(1, 1))
    print(f"rank {rank}: after a forward that evaluates: {ddp.module.running_mean.item()}")
    print(f"rank {rank}: will the next one copy too? {ddp.will_sync_module_buffers()}")
dist.destroy_process_group()
