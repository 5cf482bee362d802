"""Weights are gathered before use, in forward and again in backward, there one group ahead; gradients are scattered.

Reads:
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: FSDPParamGroup.unshard, FSDPParamGroup.reshard
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: FSDPParamGroup.pre_backward, FSDPParamGroup.post_backward
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_all_gather, foreach_reduce
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

dist.init_process_group("gloo")
rank = dist.get_rank()


def noted(word: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(params: list[Any], *rest: Any, **options: Any) -> Any:
        events.append(f"{word} {params[0]._param_fqn[0]}")
        return function(params, *rest, **options)

    return call


events: list[str] = []
watched = {"gather": "foreach_all_gather", "scatter": "foreach_reduce"}
for reshard in (True, False):
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.ReLU())
    for layer in net[:3]:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(net)
    with patch.dict(vars(group), {name: noted(word, vars(group)[name]) for word, name in watched.items()}):
        loss = net(torch.ones(1, 4)).sum()
        events.append("loss")
        loss.backward()
    if rank == 0:
        print(f"reshard {reshard}:", ", ".join(events))
    events.clear()
del net, loss  # before their group
dist.destroy_process_group()
