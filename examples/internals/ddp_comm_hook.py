"""With a communication hook the Reducer neither sums nor divides: what the hook returns is the gradient.

Reads:
torch/nn/parallel/distributed.py: DistributedDataParallel.register_comm_hook
torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py: allreduce_hook, fp16_compress_hook
torch/csrc/distributed/c10d/reducer.hpp: Reducer::run_comm_hook, Reducer::comm_hook_
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


def summed(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


for hook in (None, default_hooks.allreduce_hook, summed, default_hooks.fp16_compress_hook):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    if hook:
        ddp.register_comm_hook(None, hook)
    ddp(torch.full((1, 1), rank + 0.1)).sum().backward()
    if rank == 0:
        print(f"{hook.__name__ if hook else 'no hook'}: {ddp.module.weight.grad.item():.6f}")
del ddp  # before its group, whose threads may want Python's lock
dist.destroy_process_group()
