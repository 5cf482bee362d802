"""One forward, one reduction: a second backward through the same graph adds its gradient unreduced, without a word.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::autograd_hook, Reducer::expect_autograd_hooks_
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
loss = ddp(torch.full((1, 1), rank + 1.0)).sum()
loss.backward(retain_graph=True)
once = ddp.module.weight.grad.item()
loss.backward()
print(f"rank {rank}: {once} after one backward, {ddp.module.weight.grad.item()} after two")
dist.destroy_process_group()
