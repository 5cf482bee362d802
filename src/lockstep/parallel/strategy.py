"""How a model is spread over ranks and devices, and which of its blocks keep their input alone.

Activation checkpointing is torch's non-reentrant one, but the second pass leaves no trace: torch's own would move batch
norm's running statistics twice.
"""

import typing
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from lockstep.config import CommConfig, Config, Execution, ModelConfig, Strategy
from lockstep.distributed.proc import threads_each
from lockstep.distributed.world import World
from lockstep.errors import UserError, unknown
from lockstep.parallel.batchnorm import convert_group_batchnorm, convert_sync_batchnorm, local_batch_norms
from lockstep.parallel.ddp import DDPSync, LockstepDDP
from lockstep.parallel.exact import PREPARED, ExactSync
from lockstep.parallel.fsdp import ShardedSync, is_sharded, require_shardable, shard, units
from lockstep.parallel.module_state import preserved_state
from lockstep.parallel.parameter_hooks import hooks_of
from lockstep.parallel.sync import GradientSync


def checkpoint_activations(model: nn.Module) -> None:
    """Let each block of a model (`units`) compute again, in place: a block changes its class, and nothing else.

    Raises:
        UserError: for a model without blocks.
    """
    blocks = units(model)
    if not blocks:
        raise UserError(
            f"--activation-checkpointing: {type(model).__name__} has no blocks to compute again",
            "Build it of blocks in an nn.Sequential or nn.ModuleList, or leave the flag out.",
        )
    for block in blocks:
        block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]  # classes have hashes


@cache
def _recomputed(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        contexts = lambda: (nullcontext(), preserved_state(self))  # noqa: E731 - of the first pass and of the second
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def parallelize(
    model: nn.Module,
    world: World,
    *,
    strategy: str = "ddp",
    batch_norm: str = "auto",
    find_unused_parameters: bool = False,
    compress: str = "none",
    activation_checkpointing: bool = False,
) -> nn.Module:
    """The module that trains `model` on all ranks; in a world of one it is `model` itself.

    Args:
        model: on its device already, or on several ("ddp" alone).
        strategy: "ddp", or "fsdp" (`model` itself, its parameters sharded in place: build the optimizer afterwards).
        batch_norm: what statistics are taken over: "global", the micro-batch on all ranks ("auto": that, on several
            ranks), "local", a rank's own part of it, or "groups:SAMPLES". It changes batch norm layers in place.
        find_unused_parameters: accept parameters that take no part in a loss, as DistributedDataParallel does.
        compress: what DDP sends of a gradient: "none", "fp16" or "bf16".
        activation_checkpointing: blocks compute their insides again in the backward pass.

    Raises:
        UserError: for what the command line refuses too, as an unknown strategy.
    """
    if strategy not in (known := typing.get_args(Strategy)):
        raise unknown("strategy", str(strategy), known)
    config = Config(
        model=ModelConfig(
            batch_norm=batch_norm,
            find_unused_parameters=find_unused_parameters,
            activation_checkpointing=activation_checkpointing,
        ),
        execution=Execution(strategy=typing.cast(Strategy, strategy), device=typing.cast(Any, world.device.type)),
        comm=CommConfig(typing.cast(Any, compress)),
    )
    before = len(local_batch_norms(model))
    wrapped = spread(model, world, config)[0]
    PREPARED.add(unwrap(wrapped))
    changed = before - len(local_batch_norms(unwrap(wrapped)))
    if changed:
        over = {"global": "the whole batch on all ranks", "groups": f"groups of {config.model.group} samples"}
        world.print(
            f"lockstep: {changed} batch norm layer(s) of {type(model).__name__} now take their statistics over "
            f'{over[config.statistics(world.size)]} (batch_norm="local" leaves them as they are)'
        )
    return wrapped


def spread(
    model: nn.Module,
    world: World,
    config: Config,
    from_host: bool = False,
    *,
    twins: Iterable[nn.Module] = (),
) -> tuple[nn.Module, GradientSync]:
    """Bring a model to where a config trains it, in place: the module to call, and how gradients come together.

    The optimizer is built over the model's parameters afterwards, which FSDP replaces; TrainStep hands it to the sync.

    Args:
        from_host: whether the model was built on the host; else it stays on its devices.
        twins: copies of the model, as its moving average, which go where it goes and are not trained.
    """
    require_trainable(model)
    execution = config.execution
    if execution.strategy == "fsdp":
        require_shardable(model)
    hooks_of(model)  # before FSDP puts other parameters in their place
    for each in (model, *twins):
        _convert(each, world, config)
        if config.model.activation_checkpointing:
            checkpoint_activations(each)
        if execution.strategy == "fsdp" and world.size > 1:
            shard(each, world)  # from the host, unit by unit: no device ever holds all of it
        elif from_host:
            each.to(world.device)
    if config.exact:
        threads = threads_each(execution.threads, world.local_size)
        sync = ExactSync(model, world, config.exact, threads)
        sync.skips_unused = config.model.find_unused_parameters
        return model, sync
    if execution.strategy == "ddp" and world.size > 1:
        model = LockstepDDP(model, world, config.model.find_unused_parameters, config.comm.compress)
    if config.model.find_unused_parameters:
        _UNUSED.add(unwrap(model))
    if world.size > 1 and config.statistics(world.size) == "local" and local_batch_norms(unwrap(model)):
        _LOCAL.add(unwrap(model))
    return model, sync_of(model)


def require_trainable(model: nn.Module) -> None:
    """Raise UserError for parameters of Lazy modules that no batch has passed through, and where all are frozen."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"{type(model).__name__} has no parameter to train: requires_grad is False for all of them",
            "Let some require a gradient before this, as by model.head.requires_grad_(True).",
        )
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UserError(
            f"parameters without a shape yet: {', '.join(lazy[:5])}",
            "Pass a batch through the Lazy modules before anything else is made of the model.",
        )


def _convert(model: nn.Module, world: World, config: Config) -> None:
    """The model's batch norms as the config wants them on so many ranks."""
    match config.statistics(world.size):
        case "global":
            convert_sync_batchnorm(model, world, skip_unknown=config.model.batch_norm == "auto")
        case "groups":
            convert_group_batchnorm(model, config.model.group)


_LOCAL = WeakSet[nn.Module]()  # bare models whose batch norms follow each process's own samples, as was asked for
_UNUSED = WeakSet[nn.Module]()  # bare models of whose parameters some may take no part in a loss


def sync_of(model: nn.Module) -> GradientSync:
    """How the gradients of a module come together, as `parallelize` or a user of torch's own wrappers made it."""
    found: GradientSync
    if is_sharded(model):
        found = ShardedSync(model)
    elif isinstance(model, DistributedDataParallel):
        found = DDPSync(model)
    elif isinstance(model, nn.DataParallel):
        raise UserError(
            "nn.DataParallel gives each GPU its part of a batch, with batch statistics and random numbers of its own",
            "Pass the module that it holds, and start a process for each GPU: ls.launch, or torchrun.",
        )
    else:
        found = GradientSync()
    found.comparable = found.comparable and unwrap(model) not in _LOCAL
    found.skips_unused = unwrap(model) in _UNUSED or bool(getattr(model, "find_unused_parameters", False))
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside any nesting of DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
