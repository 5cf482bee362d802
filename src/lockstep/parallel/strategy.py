"""How a model is spread over ranks and devices: the one place that decides it."""

import typing
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import Config, Execution, LinkConfig, ModelConfig, Strategy
from lockstep.errors import UserError, unknown
from lockstep.parallel.batchnorm import convert_sync_batchnorm
from lockstep.parallel.data_parallel import ReplicaSync, data_parallel
from lockstep.parallel.ddp import DDPSync, LockstepDDP
from lockstep.parallel.exact import ExactSync
from lockstep.parallel.local import LocalSync
from lockstep.parallel.sharded import ShardedSync, is_sharded, shard
from lockstep.parallel.stages import cut
from lockstep.parallel.sync import GradientSync
from lockstep.processes.devices import devices, own_devices
from lockstep.processes.proc import cores
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
        devices: the GPUs of "dp", the model's own first (default: all).
        compress: what DDP sends of a gradient: "none", "fp16", "bf16" or "powersgd:RANK".

    Raises:
        UserError: for what the command line refuses too, as an unknown strategy or "dp" with `sync_bn`.
    """
    if strategy not in (known := typing.get_args(Strategy)):
        raise unknown("strategy", strategy, known)
    config = Config(
        model=ModelConfig(sync_bn=sync_bn, find_unused_parameters=find_unused_parameters),
        execution=Execution(strategy=typing.cast(Strategy, strategy), device=typing.cast(Any, world.device.type)),
        link=LinkConfig(compress),
    )
    return spread(model, world, config, gpus=devices)[0]


def spread(
    model: nn.Module,
    world: World,
    config: Config,
    image: tuple[int, int, int] | None = None,
    *,
    twins: Iterable[nn.Module] = (),
    gpus: list[torch.device] | None = None,
) -> tuple[nn.Module, GradientSync]:
    """Bring a model to where a config trains it, in place: the module to call, and how gradients come together.

    The optimizer is built over the model's parameters afterwards, which FSDP replaces; TrainStep hands it to the sync.

    Args:
        image: [C, H, W] of what a model sees that was built on the host; without it the model stays on its devices.
        twins: copies of the model, as its moving average, which go where it goes and are not trained.
        gpus: of "dp", where they are not the config's.
    """
    execution, link = config.execution, config.link
    if execution.strategy == "single" and world.size > 1:
        raise UserError(
            f"--strategy single is one process, and a launcher has started {world.size}", "Use --strategy ddp."
        )
    for each in (model, *twins):
        if config.model.sync_bn:
            convert_sync_batchnorm(each, world)  # first: stages hang hooks on the layers
        if execution.strategy == "fsdp" and world.size > 1:
            shard(each, world)  # from the host, unit by unit: no device ever holds all of it
        elif image is not None:
            _place(each, world, config, image)
    if config.exact:
        threads = execution.threads or max(1, cores() // world.local_size)
        return model, ExactSync(model, world, config.exact, threads)
    if link.sync_every > 1:
        outer = {"outer_lr": link.outer_lr, "outer_momentum": link.outer_momentum}
        return model, LocalSync(model, world, link.sync_every, **outer)
    if execution.strategy == "dp":
        model = data_parallel(model, world, gpus or devices(execution))
    elif execution.strategy == "ddp" and world.size > 1:
        model = LockstepDDP(model, world, config.model.find_unused_parameters, link.compress)
    return model, sync_of(model)


def _place(model: nn.Module, world: World, config: Config, image: tuple[int, int, int]) -> None:
    """Move a model from the host to the rank's device, or in stages to several."""
    if config.execution.model_parallel == 1:
        model.to(world.device)
        return
    example = torch.zeros(1, *image, dtype=next(model.parameters()).dtype)
    per_pass = -(-config.batch_size // (world.size * config.accumulate))
    cut(model, own_devices(config.execution, world.local_rank), example, per_pass)


def sync_of(model: nn.Module) -> GradientSync:
    """How the gradients of a module come together, as `parallelize` or a user of torch's own wrappers made it."""
    if is_sharded(model):
        return ShardedSync(model)
    if isinstance(model, DistributedDataParallel):
        return DDPSync(model)
    return ReplicaSync() if isinstance(model, nn.DataParallel) else GradientSync()


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside any nesting of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
