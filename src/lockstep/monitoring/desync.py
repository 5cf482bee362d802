"""The check against divergence: ranks that hold the same numbers go on, others stop with the tensor's name.

A tensor's digest is the sum, in 64-bit integers that wrap, of a hash of each element's bits and place (SplitMix64). It
changes with certainty where one element does, and with probability 1 - 2**-64 where several do; the sum has no order.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring.hang import name_ranks
from lockstep.parallel.fsdp import is_part
from lockstep.parallel.strategy import unwrap
from lockstep.randomness import bits, stream

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS = {float: torch.float64}  # a Python number is compared in its own precision
_PLACE = -0x61C8864680B583EB  # the golden ratio's 64 bits, which `bits` multiplies by too; odd, so places stay apart
_BLOCK = {"cpu": 1 << 16}  # elements whose hashes are computed together: there they stay in the cache
_BLOCK_ELSEWHERE = 1 << 21  # 16 MB as int64, of which the hash needs half a dozen at once
_REMEDY = (
    "A flipped bit, a kernel that is not deterministic, or code that changes one rank alone. Go on from a checkpoint "
    "before this step; if it comes back on the same machine, test its memory."
)


def check(
    world: World,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    buffers: Callable[[Tensor], bool] | None = None,
) -> None:
    """Compare parameters, buffers and optimizer state over the ranks, bit by bit. All ranks call it together.

    One pass over that memory on its own device, a few scalars a tensor exchanged, and two waits for the device.
    `buffers`: False for one that may differ, as of batch norm that is not synchronised.

    Raises UserError on all ranks with the same text, naming the first tensor that differs, the rank and the step.
    """
    if world.size == 1:
        return
    values = dict(contents(model, optimizer, buffers))
    layout = {name: _shape(value) for name, value in values.items()}
    layout_hash = stream(0, *(f"{name} {shape}" for name, shape in layout.items())) >> 1  # fits into an int64
    if len(set(world.rows(torch.tensor([layout_hash]))[:, 0].tolist())) > 1:
        raise UserError(_layout_difference(world, step, layout), _REMEDY)
    table = world.rows(digests(list(values.values()), world.device))
    differing = (table != table[0]).any(dim=0).nonzero().flatten().tolist()
    if differing:
        first = differing[0]
        odd, rest = _sides(table[:, first].tolist())
        names = world.gather(socket.gethostname())
        hosts = ", ".join(sorted({names[rank] for rank in odd}))
        doubt = "" if 2 * len(rest) > world.size else "; there is no majority, so either side may be wrong"
        raise UserError(
            f"the ranks differ at step {step}: {name_ranks(odd)} ({hosts}) from {name_ranks(rest)}, "
            f"first in {list(values)[first]} ({len(differing)} of {len(values)} values compared){doubt}",
            _REMEDY,
        )


def contents(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    buffers: Callable[[Tensor], bool] | None = None,
) -> Iterator[tuple[str, Tensor | float]]:
    """What must be the same on all ranks, by name, in one order: parameters, buffers, optimizer state and numbers.

    Of what FSDP has sharded there is one of each part in the world: nothing to compare.
    """
    bare = unwrap(model)
    names = {parameter: name for name, parameter in bare.named_parameters()}
    for parameter, name in names.items():
        if not is_part(parameter):
            yield name, parameter
    for name, buffer in bare.named_buffers():
        if not buffers or buffers(buffer):
            yield f"the buffer {name}", buffer
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            owner = names.get(parameter, f"parameter {p} of group {g}")
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor | int | float) and not is_part(value):
                    yield f"{key} of {owner}", value
        for key, value in group.items():
            if isinstance(value, Tensor | int | float):
                yield f"{key} of parameter group {g}", value


@torch.no_grad()
def digests(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """The digest of each value: int64 [values] on `device`. Tensors are read where they are."""
    tensors = [v if isinstance(v, Tensor) else torch.tensor(v, dtype=_NUMBERS.get(type(v))) for v in values]
    return torch.stack([digest(tensor).to(device, non_blocking=True) for tensor in tensors])


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of a dense tensor's bits in logical order (of any memory format): int64, 0-dim, on its device."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().view(-1)
    integers = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=integers.device)
    size = _BLOCK.get(integers.device.type, _BLOCK_ELSEWHERE)
    places = torch.arange(min(size, len(integers)), dtype=torch.int64, device=integers.device) * _PLACE
    for start in range(0, len(integers), size):
        part = integers[start : start + size].to(torch.int64)
        key = (start * _PLACE * _PLACE) & ((1 << 64) - 1)  # what `bits` makes of the same place's part of `places`
        total += bits(key, part + places[: len(part)]).sum()
    return total


def _shape(value: Tensor | float) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _sides(values: list[Any]) -> tuple[list[int], list[int]]:
    """The ranks that differ, and those that they differ from: the most common value's, the lowest rank's in a draw."""
    common = Counter(values).most_common(1)[0][0]
    rest = [rank for rank, value in enumerate(values) if value == common]
    return [rank for rank in range(len(values)) if rank not in rest], rest


def _layout_difference(world: World, step: int, mine: dict[str, str]) -> str:
    """All ranks together: the first thing that one rank holds in another form, or not at all."""
    everyone = world.gather(mine)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    for name in names:
        forms = [theirs.get(name, "missing") for theirs in everyone]
        if len(set(forms)) > 1:
            odd, rest = _sides(forms)
            return (
                f"the ranks differ at step {step}: {name} is {forms[odd[0]]} on {name_ranks(odd)} "
                f"and {forms[rest[0]]} on {name_ranks(rest)}"
            )
    return f"the ranks differ at step {step}: they hold the same tensors in another order"
