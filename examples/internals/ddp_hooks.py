"""Each gradient's hook counts down its bucket; a full bucket is sent while backward goes on, from the second step.

Reads:
torch/csrc/distributed/c10d/reducer.hpp: Reducer::autograd_hook, Reducer::mark_variable_ready
torch/csrc/distributed/c10d/reducer.hpp: Reducer::mark_bucket_ready, Reducer::rebuild_buckets
torch/nn/parallel/distributed.py: DistributedDataParallel._pre_forward
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


def sent(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    events.append(f"bucket {bucket.index()} sent")
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


events: list[str] = []
net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))  # a MiB each
for name, parameter in net.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(f"{name} ready"))
ddp = DistributedDataParallel(net, bucket_cap_mb=1)
ddp.register_comm_hook(None, sent)
for step in range(2):
    events.clear()
    ddp(torch.ones(1, 512)).sum().backward()
    if rank == 0:
        print(f"step {step}:", ", ".join(events))
del ddp  # before its group, whose threads may want Python's lock
dist.destroy_process_group()
