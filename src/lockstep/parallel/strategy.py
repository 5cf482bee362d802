"""How a model is spread over ranks and devices, by the name of the strategy."""

import torch
from torch import nn

from lockstep.errors import UserError
from lockstep.parallel.batchnorm import convert_sync_batchnorm
from lockstep.parallel.data_parallel import data_parallel
from lockstep.parallel.ddp import DDPSync, distributed
from lockstep.parallel.sharded import ShardedSync, is_sharded, shard
from lockstep.parallel.sync import GradientSync
from lockstep.processes.world import World


def parallelize(
    model: nn.Module,
    world: World,
    *,
    strategy: str = "ddp",
    sync_bn: bool = False,
    find_unused_parameters: bool = False,
    devices: list[torch.device] | None = None,
    compress: str = "none",
) -> nn.Module:
    """The module that trains `model` on all ranks; in a world of one it is `model` itself.

    Args:
        model: on its device already, or on several ("ddp" alone).
        strategy: "ddp", "fsdp" (`model` itself, its parameters sharded in place: build the optimizer afterwards), "dp"
            (nn.DataParallel over `devices`) or "single".
        sync_bn: batch statistics over the global batch.
        find_unused_parameters: as in DistributedDataParallel.
        compress: what DDP sends of a gradient: "none", "fp16", "bf16" or "powersgd:RANK".

    Raises:
        UserError: for "dp" without two GPUs or with `sync_bn`, and for "dp" or "single" in a run of several processes.
    """
    if strategy == "dp":
        if sync_bn:
            raise UserError("--strategy dp with --sync-bn: its copies don't talk to each other", "Use --strategy ddp.")
        return data_parallel(model, world, devices)
    if strategy == "single" and world.size > 1:
        raise UserError(
            f"--strategy single is one process, and a launcher has started {world.size}", "Use --strategy ddp."
        )
    if sync_bn:
        convert_sync_batchnorm(model, world)
    if world.size == 1:
        return model
    if strategy == "fsdp":
        return shard(model, world)
    return distributed(model, world, find_unused_parameters=find_unused_parameters, compress=compress)


def sync_of(model: nn.Module) -> GradientSync:
    """How the gradients of what `parallelize` returned come together."""
    return ShardedSync(model) if is_sharded(model) else DDPSync(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside any nesting of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
