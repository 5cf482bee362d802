"""FSDP2: each rank holds a part of every parameter, gradient and optimizer state, and borrows the rest layer by layer.

`fully_shard` makes DTensors of the parameters, in place. What is written to disk is whole tensors, so that any strategy
and any number of ranks can go on from it: `whole` gathers one (all ranks call it together), `part_of` cuts one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.module_state import copy_from_first
from lockstep.parallel.sync import BackwardSync

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE = 1_000_000  # parameters: a single layer of this size is worth a gathering of its own


def units(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: what its Sequentials and ModuleLists hold, except small single layers.

    Of a ResNet its residual blocks, of a vision transformer its encoder layers, of a VGG its large linear layers. What
    is in no unit belongs to the model itself. No unit is inside another one.
    """
    return list(dict.fromkeys(_units(model)))


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        block = next(child.children(), None) is not None
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS) and (block or _size(child) >= _LARGE):
            if _size(child):
                yield child
        else:
            yield from _units(child)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}  # precision -> what autocast computes in


def require_shardable(model: nn.Module) -> None:
    """Raise UserError for what FSDP2 can't cut; before a run, and on one process too, where nothing is cut."""
    parameters = [*model.named_parameters()]
    blocks = [[*unit.parameters()] for unit in units(model)]
    held = {p for block in blocks for p in block}
    blocks.append([p for p in model.parameters() if p not in held])
    kinds = [sorted({str(p.dtype).removeprefix("torch.") for p in block if p.requires_grad}) for block in blocks]
    unlike = [f"{' and '.join(each)} in one block" for each in kinds if len(each) > 1]
    for what, names, remedy in (
        ("a parameter that is a single number", [n for n, p in parameters if p.ndim == 0], "Give it the shape [1]"),
        ("a parameter without numbers", [n for n, p in parameters if not p.numel()], "Leave it out"),
        ("parameters of several types together", unlike, "Give them one, and convert in forward()"),
        (
            "a module of torch.jit",
            [n or type(m).__name__ for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)],
            "Train the module that was scripted or traced",
        ),
    ):
        if names:
            raise UserError(
                f"--strategy fsdp can't cut {what}: {', '.join(names[:5])}", f"{remedy}, or use --strategy ddp."
            )


def shard(model: nn.Module, world: World) -> nn.Module:
    """Shard the model's parameters over all ranks, in place, unit by unit (`units`); returns the model."""
    # here: torch.distributed.tensor takes half a second to import
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group = dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, world.device.type)
    copy_from_first(model, world)
    own, last = list(model.parameters()), torch.channels_last
    if any(p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=last) for p in own):
        model.register_forward_pre_hook(_to_channels_last)
    for p in own:  # FSDP2 takes contiguous parameters only
        p.data = p.data.contiguous()
    for unit in [*units(model), model]:
        # the root too: what it held on to after an evaluation would be plain tensors, in the place of its parameters
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return model


def _to_channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    del module
    return tuple(a.to(memory_format=torch.channels_last) if isinstance(a, Tensor) and a.ndim == 4 else a for a in args)


def is_sharded(model: nn.Module) -> bool:
    """True for a module whose forward and backward passes gather and scatter parts of parameters."""
    return any(is_part(parameter) for parameter in model.parameters())


def is_part(value: object) -> bool:
    """True for a DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this rank may hold a part; then all ranks call it together."""
    return tensor.full_tensor() if is_part(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_part(tensor) else tensor  # type: ignore[attr-defined]


def part_of(source: Tensor, like: Tensor) -> Tensor:
    """What a rank holds of a whole tensor that every rank has, cut as `like` is; without communication."""
    if not is_part(like):
        return source
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(source.to(like.device), mesh, placements, src_data_rank=None)


class ShardedSync(BackwardSync):
    """FSDP's reduce-scatter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, dist.get_world_size())
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the sum over the ranks, not their mean
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor

    @contextmanager
    def reducing(self, last: bool) -> Iterator[None]:
        """Gradients of all but the last shard stay where they are, whole; memory for one set of them is the cost."""
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    def waited_ms(self) -> float | None:
        """Nobody can tell: FSDP waits within the passes."""
        return None
