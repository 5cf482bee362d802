"""Gradients of an exact run in buckets, whose reductions overlap with the backward pass and with each other."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.parallel.fixed_point import ZERO, add_fixed, exponents, from_fixed, scales
from lockstep.parallel.modules import as_real
from lockstep.parallel.shared_sums import mapped, write_sum
from lockstep.processes.world import World

_BYTES = 25 << 20  # of gradients, as in DDP: large enough to hide latency, small enough to start during backward
_LEAST = 4  # buckets


class Bucket:
    """Parameters of one type whose gradients are reduced together: first their maxima, then their sums."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        # where a gradient's elements lie: as in its parameter, or close together where that has gaps
        self.layouts = [as_real(torch.empty_like(p, device="meta")) for p in parameters]
        self.sizes = [layout.numel() for layout in self.layouts]
        self.shared: list[Tensor] = []  # of each rank its integers, where all see them
        self.begin(0)

    def begin(self, slices: int) -> None:
        """Forget the last step; in this one so many slices of this rank will bring gradients."""
        self.received: list[list[Tensor]] = [[] for _ in self.parameters]
        self.pending = len(self.parameters) * slices
        self.work: dist.Work | None = None
        self.waited = 0.0  # seconds

    def start_maximum(self, world: World) -> None:
        """Start the all-reduce of the parameters' exponents."""
        self.exponents = largest([[as_real(g) for g in grads] for grads in self.received], world.device)
        if world.size > 1:
            self.work = dist.all_reduce(self.exponents, dist.ReduceOp.MAX, async_op=True)

    def start_sum(self, world: World, slices: int) -> None:
        """Start the all-reduce of the integers. Gradients of float32 and float64 lose their values to the scaling."""
        self._wait()
        # every rank has read what was here: it has sent its maxima of this step since
        self.sums = (
            self.shared[world.rank] if self.shared else torch.empty(self.size, dtype=torch.int64, device=world.device)
        )
        into, self.out_of = scales(self.exponents, slices, self.layouts[0].dtype)
        for grads, scale, part in zip(self.received, into.unbind(), self._parts(), strict=True):
            add_fixed(part, [as_real(g) for g in grads], scale)
        if world.size > 1:  # what lies in shared memory needs a word alone that all have written
            self.work = dist.all_reduce(torch.zeros(1) if self.shared else self.sums, async_op=True)

    @property
    def size(self) -> int:
        """Numbers in the gradients, a complex one counts as two."""
        return sum(self.sizes)

    def _parts(self) -> list[Tensor]:
        """The sums of each parameter, with its layout's shape and strides."""
        flat = torch.split(self.sums, self.sizes)
        return [
            part.as_strided(layout.shape, layout.stride(), part.storage_offset())
            for part, layout in zip(flat, self.layouts, strict=True)
        ]

    def _wait(self) -> None:
        if self.work is not None:
            began = time.perf_counter()
            self.work.wait()
            self.waited += time.perf_counter() - began

    def write(self) -> None:
        """Wait for the sums and make them the parameters' gradients."""
        self._wait()
        shared = list(zip(*(torch.split(flat, self.sizes) for flat in self.shared), strict=True))
        for i, (p, grads, layout, out, part) in enumerate(
            zip(self.parameters, self.received, self.layouts, self.out_of.unbind(), self._parts(), strict=True)
        ):
            used = bool(grads) and as_real(grads[0]).stride() == layout.stride()
            p.grad = grads[0] if used else torch.empty_like(p)  # the memory of the first slice's is free now
            if shared:
                write_sum(shared[i], out, as_real(p.grad))
            else:
                from_fixed(part, out, as_real(p.grad))
        del self.sums, self.received


def buckets_of(model: nn.Module, world: World) -> list[Bucket]:
    """The trainable parameters in reverse order of registration, about the order in which backward delivers them.

    A bucket's sum starts when the next one is full, so a small model is cut into four too: else nothing would overlap.
    Through shared memory nothing is sent that could, and each further bucket costs its small operators.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    shared = mapped(world, sum(as_real(torch.empty_like(p, device="meta")).numel() for p in parameters))
    most = len(parameters) if shared else -(-len(parameters) // _LEAST)
    buckets: list[list[nn.Parameter]] = [[]]
    room = _BYTES
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        last = buckets[-1]
        if last and (room < size or len(last) == most or last[0].dtype != p.dtype):
            buckets.append([])
            room = _BYTES
        buckets[-1].append(p)
        room -= size
    found = [Bucket(parameters) for parameters in buckets if parameters]
    for parts in (torch.split(flat, [bucket.size for bucket in found]) for flat in shared):
        for bucket, part in zip(found, parts, strict=True):
            bucket.shared.append(part)
    return found


_indices: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}  # made once: a copy to a device is waited for


def largest(groups: list[list[Tensor]], device: torch.device) -> Tensor:
    """The exponent of each group of tensors: int32 [groups]; ZERO for an empty group."""
    flat, counts = exponents([t for group in groups for t in group]).to(device), [len(group) for group in groups]
    if flat.numel() and len(set(counts)) == 1:
        return flat.view(len(groups), -1).amax(dim=1)
    key = device, tuple(counts)
    if key not in _indices:
        _indices[key] = torch.repeat_interleave(torch.tensor(counts)).to(device)
    out = torch.full((len(groups),), ZERO, dtype=torch.int32, device=device)
    return out.scatter_reduce_(0, _indices[key], flat, "amax")
