"""Whether a backward is reduced was decided at the end of its forward: no_sync around backward alone changes nothing.

Reads:
torch/nn/parallel/distributed.py: DistributedDataParallel.no_sync, DistributedDataParallel._post_forward
torch/csrc/distributed/c10d/reducer.hpp: Reducer::prepare_for_backward, Reducer::expect_autograd_hooks_
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
x = torch.full((1, 1), rank + 1.0)


def gradient(forward: bool, backward: bool) -> float:
    ddp.zero_grad()
    with ddp.no_sync() if forward else nullcontext():
        y = ddp(x).sum()
    with ddp.no_sync() if backward else nullcontext():
        y.backward()
    return ddp.module.weight.grad.item()


for forward, backward in ((False, False), (True, True), (False, True), (True, False)):
    print(f"rank {rank}: no_sync around forward {forward}, backward {backward}: gradient {gradient(forward, backward)}")
dist.destroy_process_group()
