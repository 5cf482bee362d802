"""A parameter without a gradient leaves its bucket unsent; the next forward says so. Searching the graph mends it.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::ensure_prior_reduction_finished, Reducer::prepare_for_backward
torch/csrc/distributed/c10d/reducer.hpp: Reducer::local_used_map_
torch/nn/parallel/distributed.py: _find_tensors, _DDPSink
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.layers[rank]
        return branch(x)


ddp = DistributedDataParallel(Branches())
try:
    for step in range(2):
        ddp(torch.ones(1, 1)).sum().backward()
        print(f"rank {rank}: step {step} done, its branch's gradient is {ddp.module.layers[rank].weight.grad.item()}")
except RuntimeError as error:
    print(f"rank {rank}: {str(error).partition('. ')[0]}. {str(error).splitlines()[-2]}")

ddp = DistributedDataParallel(Branches(), find_unused_parameters=True)
ddp(torch.ones(1, 1)).sum().backward()
print(f"rank {rank}: found", [None if p.grad is None else p.grad.item() for p in ddp.parameters()])
dist.destroy_process_group()
