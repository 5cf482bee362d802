"""gradient_as_bucket_view: the gradients lie in the buckets, in one storage.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::initialize_bucket_views, Reducer::gradient_as_bucket_view_
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

for view in (False, True):
    ddp = DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=view)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
    weight, bias = (parameter.grad for parameter in ddp.parameters())
    shared = weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    if rank == 0:
        print(
            f"view {view}: {weight.untyped_storage().nbytes()} bytes behind weight's gradient, bias's in them: {shared}"
        )
try:
    weight.detach_()
except RuntimeError as error:
    print(f"rank {rank}: {str(error).partition('.')[0]}.")
dist.destroy_process_group()
