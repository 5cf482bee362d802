"""Sums without an order: floats as integers on a scale that all ranks share, and gradients in buckets of them.

For a tensor whose largest magnitude over all contributions is M < 2**e, a contribution g becomes `(g *
2**k).to(int64)` with k = 62 - ceil(log2 contributions) - e, so that their sum can't overflow. The conversion drops
less than 2**-k, and the sum becomes a float once: relative to M the error of a sum of 8 is below 2**-54 before that
rounding.

Processes of one machine add their integers in memory that all of them map: through gloo's sockets an int64 sum costs
twice a float32 one.
"""

import math
import os
import secrets
import time
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.distributed.world import World
from lockstep.parallel.module_state import as_real

# stand-ins for the exponents of 0 and of infinity or NaN; `max` keeps them in order
ZERO, NON_FINITE = -100_000, 100_000
# k of a float32 is limited so that 2**k and 2**-k are normal numbers; gradients below 2**-67 lose bits to that
_LARGEST_K = {torch.float64: 1000, torch.float32: 126, torch.bfloat16: 126, torch.float16: 126}


def exponents(tensors: Sequence[Tensor]) -> Tensor:
    """For each tensor the least e with max |x| < 2**e, or ZERO or NON_FINITE: int32 [len(tensors)], on their device."""
    if not tensors:
        return torch.empty(0, dtype=torch.int32)
    largest = _largest(tensors)
    e = torch.frexp(largest).exponent
    e = torch.where(largest == 0, ZERO, e)
    return torch.where(torch.isfinite(largest), e, NON_FINITE).to(torch.int32)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """max |x| of each as float64 [n], NaN where there is one. On a CPU several times faster than infinity norms."""
    if tensors[0].device.type != "cpu" and all(t.numel() for t in tensors):  # there a few kernels for all of them
        return torch.stack(torch._foreach_norm([t.detach() for t in tensors], math.inf)).to(torch.float64)
    zero = tensors[0].new_zeros(())
    ends = [torch.aminmax(t.detach()) if t.numel() else (zero, zero) for t in tensors]
    low, high = (torch.stack([end[i] for end in ends]) for i in (0, 1))
    return torch.maximum(-low, high).to(torch.float64)


def scales(exponent: Tensor, contributions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factors into and out of fixed point for global exponents: two tensors [n] of `dtype`'s compute type.

    A non-finite exponent gives factors 0 and NaN: every rank then writes NaN, whatever its own part was.
    """
    limit = _LARGEST_K[dtype]
    k = (62 - math.ceil(math.log2(contributions)) - exponent).clamp(-limit, limit)
    finite, wide = exponent < NON_FINITE, dtype == torch.float64
    return torch.where(finite, _power(k, wide), 0.0), torch.where(finite, _power(-k, wide), math.nan)


def _power(k: Tensor, wide: bool) -> Tensor:
    """2**k of normal numbers as float64 or float32, by its bits: a vectorised pow may be an ulp off."""
    if wide:
        return ((k.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((k.to(torch.int32) + 127) << 23).view(torch.float32)


def to_fixed(tensor: Tensor, into: Tensor) -> Tensor:
    """A tensor on the scale `into` (0-dim), as int64 of its shape and strides. Non-finite values become any integer."""
    return (tensor.to(into.dtype) * into).to(torch.int64)


def add_fixed(sums: Tensor, tensors: Sequence[Tensor], into: Tensor) -> None:
    """Write the sum of some tensors on the scale `into` to the int64 tensor `sums`; zero where there is none.

    The first one is converted in place: no zeros to write, no second int64 tensor. Tensors of the scale's own type are
    multiplied in place, and hold no gradient afterwards.
    """
    if not tensors:
        sums.zero_()
    for i, tensor in enumerate(tensors):
        scaled = tensor.mul_(into) if tensor.dtype == into.dtype else tensor.to(into.dtype).mul_(into)
        if i == 0:
            sums.copy_(scaled)
        else:
            sums.add_(scaled.to(torch.int64))


def from_fixed(sums: Tensor, out_of: Tensor, into: Tensor) -> Tensor:
    """Write a summed int64 tensor, taken off its scale, into the floating-point tensor `into`; one rounding."""
    if into.dtype in (torch.float32, torch.float64):
        return into.copy_(sums).mul_(out_of)
    return into.copy_(sums.to(torch.float32).mul_(out_of))


_HEAD = 8  # integers before the others: whose memory it is, and a cache line's distance
_MOST = 8  # ranks: each reads the integers of all, where a ring would have it read a part of them
_AT_ONCE = 1 << 16  # integers that are added while they are in a core's cache


def mapped(world: World, count: int) -> list[Tensor]:
    """For each rank int64 [count] that all ranks see, this rank's to write; empty where that can't be had.

    All ranks call it together and get the same answer. The memory has no name in any folder, and goes with the last
    process that maps it.
    """
    one_machine = 1 < world.size == world.local_size <= _MOST and world.device.type == "cpu"
    if not one_machine or not count:
        return []
    token, size = secrets.token_bytes(16), _HEAD + count
    own = os.memfd_create("lockstep-sums", os.MFD_CLOEXEC)
    try:
        try:
            os.posix_fallocate(own, 0, 8 * size)  # all of it now: memory that is not there later would end the process
            os.pwrite(own, token, 0)
            place = f"/proc/{os.getpid()}/fd/{own}"
        except OSError:
            place = ""
        others = world.gather([place, token.hex()])
        found = [_opened(path, bytes.fromhex(expected), size) for path, expected in others]
        complete = all(world.gather(None not in found))  # nobody closes before all have opened
    finally:
        os.close(own)
    return [each for each in found if each is not None] if complete else []


def _opened(path: str, token: bytes, size: int) -> Tensor | None:
    """The integers behind a path, None where it is another machine's or another process's."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(descriptor, len(token), 0) != token or os.fstat(descriptor).st_size != 8 * size:
            return None
        # not Python's mmap, which keeps a descriptor open
        return torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.int64)[_HEAD:]
    except (OSError, RuntimeError):  # torch's, where there are no more mappings to be had
        return None
    finally:
        os.close(descriptor)


def write_sum(parts: Sequence[Tensor], out_of: Tensor, into: Tensor) -> None:
    """Write the sum of all ranks' integers [n], taken off its scale, to the n floats of `into`, in memory's order."""
    flat = into.as_strided((into.numel(),), (1,))
    for start in range(0, len(flat), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        some = torch.add(parts[0][rows], parts[1][rows])
        for part in parts[2:]:
            some.add_(part[rows])
        from_fixed(some, out_of, flat[rows])


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


def largest(groups: list[list[Tensor]], device: torch.device) -> Tensor:
    """The exponent of each group of tensors: int32 [groups]; ZERO for an empty group."""
    flat, counts = exponents([t for group in groups for t in group]).to(device), [len(group) for group in groups]
    if flat.numel() and len(set(counts)) == 1:
        return flat.view(len(groups), -1).amax(dim=1)
    out = torch.full((len(groups),), ZERO, dtype=torch.int32, device=device)
    return out.scatter_reduce_(0, _indices(tuple(counts), device), flat, "amax")


@lru_cache
def _indices(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Of each tensor the number of its group; kept, for a copy to a device is waited for."""
    return torch.repeat_interleave(torch.tensor(counts)).to(device)
