"""Gradients of an exact run in buckets, whose reductions overlap with the backward pass and with each other."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.parallel.fixed_point import ZERO, add_fixed, exponents, from_fixed, scales
from lockstep.processes.world import World

_BYTES = 25 << 20  # of gradients, as in DDP: large enough to hide latency, small enough to start during backward
_LEAST = 4


class Bucket:
    """Parameters whose gradients are reduced together: first their maxima, then their sums."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sizes = [p.numel() for p in parameters]
        self.begin()

    def begin(self) -> None:
        """Forget the last step."""
        self.pending = len(self.parameters)
        self.work: dist.Work | None = None
        self.waited = 0.0  # seconds

    def _slices_of(self, p: nn.Parameter, held: list[dict[nn.Parameter, Tensor]]) -> list[Tensor]:
        grads = [grads[p] for grads in held if p in grads]
        return grads if p.grad is None else [*grads, p.grad]

    def start_maximum(self, world: World, held: list[dict[nn.Parameter, Tensor]]) -> None:
        """Start the all-reduce of the parameters' exponents."""
        self.exponents = largest([self._slices_of(p, held) for p in self.parameters], world.device)
        if world.size > 1:
            self.work = dist.all_reduce(self.exponents, dist.ReduceOp.MAX, async_op=True)

    def start_sum(self, world: World, slices: int, held: list[dict[nn.Parameter, Tensor]]) -> None:
        """Start the all-reduce of the integers."""
        self._wait()
        self.sums = torch.empty(sum(self.sizes), dtype=torch.int64, device=world.device)
        self.out_of = []
        for p, e, part in zip(self.parameters, self.exponents, torch.split(self.sums, self.sizes), strict=True):
            into, out = scales(e, slices, p.dtype)
            self.out_of.append(out)
            add_fixed(_like(part, p), self._slices_of(p, held), into)
        if world.size > 1:
            self.work = dist.all_reduce(self.sums, async_op=True)

    def _wait(self) -> None:
        if self.work is not None:
            began = time.perf_counter()
            self.work.wait()
            self.waited += time.perf_counter() - began

    def write(self) -> None:
        """Wait for the sums and make them the parameters' gradients."""
        self._wait()
        for p, out, part in zip(self.parameters, self.out_of, torch.split(self.sums, self.sizes), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            from_fixed(_like(part, p), out, p.grad)
        del self.sums


def buckets_of(model: nn.Module) -> list[Bucket]:
    """The trainable parameters in reverse order of registration, about the order in which backward delivers them.

    A bucket's sum starts when the next one is full, so a small model is cut into four too: else nothing would overlap.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    most = -(-len(parameters) // _LEAST)
    buckets: list[list[nn.Parameter]] = [[]]
    room = _BYTES
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if buckets[-1] and (room < size or len(buckets[-1]) == most):
            buckets.append([])
            room = _BYTES
        buckets[-1].append(p)
        room -= size
    return [Bucket(parameters) for parameters in buckets if parameters]


def largest(groups: list[list[Tensor]], device: torch.device) -> Tensor:
    """The exponent of each group of tensors: int32 [groups]; ZERO for an empty group."""
    flat = exponents([t for group in groups for t in group]).to(device)
    out = torch.full((len(groups),), ZERO, dtype=torch.int32, device=device)
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group], dtype=torch.int64, device=device)
    return out.scatter_reduce_(0, index, flat, "amax")


def _like(flat: Tensor, p: Tensor) -> Tensor:
    """A flat part seen with a parameter's shape and strides (dense, in any memory format)."""
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
