"""join: ranks that are through answer the others' collectives with zeros, and the divisor is still N.

Reads:
torch/distributed/algorithms/join.py: Join, Join.notify_join_context
torch/nn/parallel/distributed.py: DistributedDataParallel.join, _DDPJoinHook.main_hook, _DDPJoinHook.post_hook
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
for options in ({}, {"divide_by_initial_world_size": False}, {"throw_on_early_termination": True}):
    gradients = []
    try:
        with ddp.join(**options):
            for _ in range(1 + 2 * rank):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                gradients.append(ddp.module.weight.grad.item())
        print(f"rank {rank}: {options} gradients {gradients}")
    except RuntimeError as error:
        print(f"rank {rank}: {options} {error}")
del ddp  # before its group, whose threads may want Python's lock
dist.destroy_process_group()
