"""The constructor compares the ranks' parameters and copies rank 0's weights to all; nobody compares them again.

Reads:
torch/nn/parallel/distributed.py: DistributedDataParallel.__init__
torch/distributed/utils.py: _verify_param_shape_across_processes, _sync_module_states
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

net = nn.Linear(1, 1)
nn.init.constant_(net.weight, rank + 1.0)
ddp = DistributedDataParallel(net)
print(f"rank {rank}: weight {rank + 1.0} before, {net.weight.item()} after; keys {list(ddp.state_dict())}")

with torch.no_grad():
    net.weight += rank
ddp(torch.ones(1, 1)).sum().backward()
print(f"rank {rank}: weight {net.weight.item()} after a step that added the rank, and no error")

try:
    DistributedDataParallel(nn.Linear(1, 1, bias=rank == 0))
except RuntimeError as error:
    print(f"rank {rank}: {error}")
dist.destroy_process_group()
