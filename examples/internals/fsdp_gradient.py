"""The gradient is DDP's average, a piece on each rank. Unsynchronised, it stays whole and its memory with it.

Reads:
torch/distributed/fsdp/_fully_shard/_fully_shard.py: FSDPModule.set_requires_gradient_sync
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_reduce
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: FSDPParamGroup.post_backward
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


def gradient(net: nn.Module) -> list[float] | None:
    grad = net.weight.grad
    return None if grad is None else grad.to_local().flatten().tolist()


net = nn.Linear(2, 2, bias=False)
fully_shard(net)
x = torch.full((1, 2), rank + 1.0)
(net(x) * 1).sum().backward()
print(f"rank {rank}: its row {gradient(net)}, the mean of 1 and 2")
net.zero_grad()
for last in (False, True):
    net.set_requires_gradient_sync(last)
    (net(x) * 1).sum().backward()
    print(f"rank {rank}: with gradient sync {last}, its row: {gradient(net)}")
del net  # before its group
dist.destroy_process_group()
