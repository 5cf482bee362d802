"""Buffers in exact mode: every slice starts from the step's, and the average of their changes is added, exactly.

A buffer is known by module and name, and each slice gets copies in memory of their own: forward may write into them or
replace them. Floating-point ones, complex ones included, move by the mean change over all slices; integers by the
floor of it; a truth value is flipped where any slice has flipped it. What no slice changes keeps its bits, infinities
too; an infinity that a slice replaces counts as 0.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.fixed_point import ZERO, exponents, scales, to_fixed
from lockstep.parallel.modules import Places, as_real, unequal
from lockstep.processes.world import World

_CHANGED = ZERO + 1  # in the place of an exponent, for what is no floating-point number


class ExactBuffers:
    """The buffers of one step: `enter` before a slice, `leave` after it, `finish` at the end."""

    def __init__(self, model: nn.Module, world: World, slices: int) -> None:
        self.model, self.world, self.slices = model, world, slices
        self.begin()

    def begin(self) -> None:
        """Before the first slice: what is there now is where each starts."""
        self.places = Places(self.model.modules())
        self.names = _names(self.model)
        found = {
            id(t): (self.names[id(module), name], t)
            for module, held in zip(self.places.modules, self.places.held, strict=True)
            for name, t in held.items()
            if t is not None
        }
        self.starts = [t for _, t in found.values()]
        self.labels = [name for name, _ in found.values()]
        self.index = {key: i for i, key in enumerate(found)}
        self.sums: list[list[Tensor]] = [[] for _ in self.starts]  # changes of each, by slice
        self.count = 0

    def enter(self, module: nn.Module) -> None:
        """Give the model or a copy of it buffers of its own, as they were at the step's beginning."""
        if self.starts:
            Places(module.modules()).put(self.places.copies())

    @torch.no_grad()
    def leave(self, module: nn.Module) -> list[Tensor | None]:
        """How a slice has changed each buffer: None for what it left alone; float tensors, or int64."""
        changes: list[Tensor | None] = [None] * len(self.starts)
        places = Places(module.modules())
        for master, held, now in zip(self.places.modules, self.places.held, places.held, strict=True):
            for name in held.keys() | now.keys():
                before, after = held.get(name), now.get(name)
                if before is None and after is None:
                    continue
                if before is None or after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
                    raise UserError(
                        f"--exact {self.slices}: forward made the buffer {self._name(master, name)} another one, "
                        f"{_described(before)} before and {_described(after)} after",
                        "Give it its final shape and type in __init__, or keep it as a plain attribute.",
                    )
                changes[self.index[id(before)]] = _change(as_real(before), as_real(after.detach()))
        return changes

    def _name(self, module: nn.Module, name: str) -> str:
        return self.names.get((id(module), name), name)

    def add(self, changes: list[Tensor | None]) -> None:
        """Count a slice's changes in."""
        self.count += 1
        for sums, change in zip(self.sums, changes, strict=True):
            if change is not None:
                sums.append(change)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the step's own buffers back in their places, moved by the mean over all slices of all ranks."""
        self.places.put(self.places.held)
        if not self.starts:
            return
        device, exponent = self.world.device, self._exponents()
        if self.world.size > 1:
            dist.all_reduce(exponent, dist.ReduceOp.MAX)
        moved = list(range(len(self.starts)))
        if device.type == "cpu":  # elsewhere nobody waits to know
            moved = [i for i, e in enumerate(exponent.tolist()) if e > ZERO]
        if not moved:
            return
        starts = [as_real(self.starts[i]) for i in moved]
        parts, out_of = [torch.full((1,), self.count, dtype=torch.int64, device=device)], []
        for start, i in zip(starts, moved, strict=True):
            into, out = scales(exponent[i], self.slices, _wide(start))
            out_of.append(out)
            summed = torch.zeros(start.shape, dtype=torch.int64, device=device)
            for change in self.sums[i]:
                summed += to_fixed(change, into) if start.is_floating_point() else change
            parts.append(summed.flatten())
        count, *totals = torch.split(self.world.sum(torch.cat(parts)), [part.numel() for part in parts])
        for start, total, out in zip(starts, totals, out_of, strict=True):
            _move(start, total.view(start.shape), out, count)

    def _exponents(self) -> Tensor:
        """Of the largest change of each buffer over this rank's slices: int32 [buffers] on the device."""
        found = [
            torch.full((), _CHANGED if sums else ZERO, dtype=torch.int32, device=self.world.device)
            if not (sums and sums[0].is_floating_point())
            else exponents(sums).max()
            for sums in self.sums
        ]
        return torch.stack(found).to(torch.int32)


def _wide(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.is_floating_point() else torch.float64


def _change(before: Tensor, after: Tensor) -> Tensor | None:
    different = unequal(before, after)
    if before.device.type == "cpu" and not bool(different.any()):
        return None
    if not before.is_floating_point():
        return after.to(torch.int64) - before.to(torch.int64)
    return torch.where(different, after - torch.where(before.isfinite(), before, 0.0), 0.0)


def _move(start: Tensor, total: Tensor, out: Tensor, count: Tensor) -> None:
    """Move a buffer by a summed change over `count` slices."""
    if start.dtype == torch.bool:
        start.copy_(torch.where(total != 0, ~start, start))
    elif not start.is_floating_point():
        start.copy_((start.to(torch.int64) + total // count[0]).to(start.dtype))
    else:
        # one division of the summed changes, in float64: the average over all slices of all ranks
        change = (total.to(torch.float64) * out / count[0]).to(start.dtype)
        moved = torch.where(start.isfinite(), start, 0.0) + change
        start.copy_(torch.where((total == 0) & ~out.isnan(), start, moved))


def _described(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _names(model: nn.Module) -> dict[tuple[int, str], str]:
    """(id of a module, name in it) -> the buffer's full name."""
    return {
        (id(module), name): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._buffers
    }
