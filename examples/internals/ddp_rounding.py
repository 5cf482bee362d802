"""Other buckets, other sums: on three ranks the first step's gradients differ in the last bits from all later ones.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::rebuild_buckets, Reducer::run_allreduce_hook
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(8))), bucket_cap_mb=1)
torch.manual_seed(rank)
x = torch.randn(8, 300)
steps = []
for _ in range(3):  # the same weights, the same samples
    ddp.zero_grad()
    ddp(x).square().sum().backward()
    steps.append(torch.cat([parameter.grad.flatten() for parameter in ddp.parameters()]))
if rank == 0:
    print("second as first:", torch.equal(steps[0], steps[1]), "- third as second:", torch.equal(steps[1], steps[2]))
    print("within rounding:", torch.allclose(steps[0], steps[1], rtol=1e-4, atol=1e-6))
dist.destroy_process_group()
