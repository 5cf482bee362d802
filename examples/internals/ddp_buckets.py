"""One bucket in the first step; then 1 MiB for the first, 25 for the others, filled in the order of the gradients.

Reads:
torch/nn/parallel/distributed.py: DistributedDataParallel._ddp_init_helper
torch/csrc/distributed/c10d/reducer.hpp: compute_bucket_assignment_by_size, kDefaultFirstBucketBytes
torch/csrc/distributed/c10d/reducer.hpp: kDefaultBucketBytesCap, Reducer::should_rebuild_buckets
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


def sizes(data: dict[str, str], key: str) -> str:
    return ", ".join(f"{int(size) / 2**20:g}" for size in data[key].split(", ")) if key in data else "none"


for options in ({}, {"bucket_cap_mb": 8}, {"find_unused_parameters": True}):
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))), **options)
    for _ in range(3):
        ddp(torch.ones(1, 1024)).sum().backward()
    data = ddp._get_ddp_logging_data()
    if rank == 0:
        print(options, "- MiB:", sizes(data, "bucket_sizes"), "- rebuilt:", sizes(data, "rebuilt_bucket_sizes"))
dist.destroy_process_group()
