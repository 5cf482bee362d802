"""fully_shard changes the module's class in place; its parameters become DTensors, a rank holding some of their rows.

Reads:
torch/distributed/fsdp/_fully_shard/_fully_shard.py: fully_shard, FSDPModule
torch/distributed/fsdp/_fully_shard/_fsdp_param.py: FSDPParam._init_sharded_param
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()

net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.ReLU())
for layer in net[:2]:
    fully_shard(layer)
fully_shard(net)
if rank == 0:
    print([cls.__name__ for cls in type(net).__mro__[:3]])
for name, parameter in net.named_parameters():
    own = list(parameter.to_local().shape)
    print(f"rank {rank}: {name} {type(parameter).__name__} {list(parameter.shape)}, of it here {own}")
before = net[0].weight
net(torch.ones(1, 4)).sum().backward()
own = list(net[0].weight.grad.to_local().shape)
print(f"rank {rank}: of its gradient here {own}, still the same parameter: {net[0].weight is before}")
del net  # before its group
dist.destroy_process_group()
