"""A parameter may be ready once per step. static_graph counts in the first step how often it is.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::checkAndRaiseMarkedTwiceError, Reducer::set_static_graph
torch/csrc/distributed/c10d/reducer.hpp: Reducer::delay_all_reduce, Reducer::numGradHooksTriggeredMapPerIteration_
torch/nn/parallel/distributed.py: DistributedDataParallel._set_static_graph
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank = dist.get_rank()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight), nn.init.ones_(self.shared.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.shared, self.first(x), use_reentrant=True)
        return checkpoint(self.shared, x, use_reentrant=True)


for static in (False, True):
    ddp = DistributedDataParallel(Twice(), static_graph=static)
    try:
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        print(f"rank {rank}: static {static}, gradients", [parameter.grad.item() for parameter in ddp.parameters()])
    except RuntimeError as error:
        print(f"rank {rank}: static {static}, {str(error).partition('.')[0]}.")
dist.destroy_process_group()
