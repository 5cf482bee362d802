"""Exact mode: the same bits on any number of processes.

The global batch is cut into V shards, whatever the number of processes; a rank owns a contiguous run of them and takes
each through the model by itself, with its own dropout seed and its own batch statistics. What is added over shards
(gradients, and the changes of buffers) is added as integers on a scale of this step's global maximum (`fixed_point`):
integer addition has no order, so ring, bucket and N can't change a bit, and there is no state to save.

Memory beyond plain DDP's: the gradients once more for each further shard of this rank, and 8 bytes a parameter for the
sums.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.devices import device_name
from lockstep.errors import UserError
from lockstep.parallel.fixed_point import ZERO, add_fixed, exponents, from_fixed, scales, to_fixed
from lockstep.parallel.sync import GradientSync, copy_from_first
from lockstep.world import World

_BUCKET_BYTES = 25 << 20  # of gradients, as in DDP: large enough to hide latency, small enough to start during backward
_LEAST_BUCKETS = 4


def configure(world: World, threads: int) -> None:
    """Make this process's kernels repeatable, and refuse a world whose ranks would round differently.

    Sets the intra-op threads (kernels split their sums by them) and deterministic algorithms; no TF32, no autotuning.

    Raises:
        UserError: where devices, torch versions or thread counts differ between ranks, and on MPS.
    """
    if world.device.type == "mps":
        raise UserError("--shards on mps: its sums are scaled in float64, which MPS has not", "Use --device cpu.")
    torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    # it would cost a write of every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    everyone = world.gather(rounding(world.device))
    for what, first in everyone[0].items():
        for rank, theirs in enumerate(everyone):
            if theirs[what] != first:
                raise UserError(
                    f"--shards: {what} is {first} on rank 0 and {theirs[what]} on rank {rank}, which round differently",
                    "Run on machines of one kind with the same software and the same --threads.",
                )


def rounding(device: torch.device) -> dict[str, str | int]:
    """What decides how kernels round beside their input; two runs agree to the bit only where this does."""
    return {"torch": torch.__version__, "device": device_name(device), "CPU threads": torch.get_num_threads()}


class ExactSync(GradientSync):
    """Gradients of a global batch's shards, added exactly.

    Args:
        model: the bare module, the same on all ranks; this makes rank 0's weights and buffers everyone's.
        world: the ranks.
        shards: V, the same for every N that shall agree.
    """

    def __init__(self, model: nn.Module, world: World, shards: int) -> None:
        self.world, self.shards = world, shards
        self.buckets = _buckets(model)
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.counters = [b for b in model.buffers() if not b.is_floating_point() and b.dtype != torch.bool]
        copy_from_first(model, world)
        self.bucket_of: dict[Tensor, _Bucket] = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._delivered)  # type: ignore[no-untyped-call]
        self.waits: list[float] = []  # seconds of each step since somebody asked
        self._begin()

    def _begin(self) -> None:
        self.held: list[dict[nn.Parameter, Tensor]] = []  # gradients of this rank's shards but the last
        self.changes: list[list[Tensor]] = []  # of buffers and counters, by shard
        self.launched = 0
        self.listening = False
        for bucket in self.buckets:
            bucket.begin()

    @contextmanager
    def piece(self, size: int, last: bool) -> Iterator[None]:
        """Around one shard's passes: buffers start from the step's beginning each time, gradients are set aside."""
        del size
        before = [b.clone() for b in (*self.buffers, *self.counters)]
        self.listening = last  # the last shard's backward starts the reduction, bucket by bucket
        try:
            yield
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise UserError(
                f"--shards {self.shards}: {str(error).splitlines()[0]}",
                "Replace that operator in the model, or train without --shards.",
            ) from error
        self.listening = False
        now = [*self.buffers, *self.counters]
        self.changes.append([b - old for b, old in zip(now, before, strict=True)])
        for b, old in zip(now, before, strict=True):
            b.copy_(old)
        if not last:
            grads = {p: p.grad for bucket in self.buckets for p in bucket.parameters if p.grad is not None}
            for p in grads:
                p.grad = None
            self.held.append(grads)

    def _delivered(self, parameter: Tensor) -> None:
        if self.listening:
            self.bucket_of[parameter].pending -= 1
            while self.launched < len(self.buckets) and self.buckets[self.launched].pending == 0:
                self._launch()

    def _launch(self) -> None:
        """Start the next bucket's maximum, and the sum of the one before: its maximum has had time to arrive.

        Buckets go in one fixed order on all ranks, whatever order their gradients come in.
        """
        if self.launched < len(self.buckets):
            self.buckets[self.launched].start_maximum(self.world, self.held)
        if self.launched > 0:
            self.buckets[self.launched - 1].start_sum(self.world, self.shards, self.held)
        self.launched += 1

    def finish(self) -> None:
        """Write the summed gradients and the average change of the buffers, on every rank the same."""
        while self.launched <= len(self.buckets):
            self._launch()
        self._average_changes()
        for bucket in self.buckets:
            bucket.write()
        self.waits.append(sum(bucket.waited for bucket in self.buckets))
        self._begin()

    def waited_ms(self) -> float | None:
        """The mean over the steps since the last call. A GPU's host does not wait, so there nobody can tell."""
        waits, self.waits = self.waits, []
        return None if self.world.device.type != "cpu" else 1e3 * sum(waits) / max(1, len(waits))

    def _average_changes(self) -> None:
        if not self.buffers and not self.counters:
            return
        floats = [[change[i] for change in self.changes] for i in range(len(self.buffers))]
        whole = [[change[i + len(self.buffers)] for change in self.changes] for i in range(len(self.counters))]
        exponent = _largest(floats, self.world.device)
        if self.world.size > 1:
            dist.all_reduce(exponent, dist.ReduceOp.MAX)
        sums, out_of = [torch.tensor([len(self.changes)], device=self.world.device)], []
        for buffer, changes, e in zip(self.buffers, floats, exponent, strict=True):
            into, out = scales(e, self.shards, buffer.dtype)
            out_of.append(out)
            sums.append(_summed([to_fixed(c, into) for c in changes], buffer).flatten())
        sums += [_summed(changes, counter).flatten() for changes, counter in zip(whole, self.counters, strict=True)]
        flat = self.world.sum(torch.cat(sums))
        count, *totals = torch.split(flat, [s.numel() for s in sums])
        for buffer, total, out in zip(self.buffers, totals, out_of, strict=False):
            # one division of the summed changes, in float64: the average over all shards of all ranks
            buffer += (total.to(torch.float64) * out / count).to(buffer.dtype).view_as(buffer)
        for counter, total in zip(self.counters, totals[len(self.buffers) :], strict=True):
            counter += (total // count).to(counter.dtype).view_as(counter)


class _Bucket:
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

    def _shards_of(self, p: nn.Parameter, held: list[dict[nn.Parameter, Tensor]]) -> list[Tensor]:
        grads = [grads[p] for grads in held if p in grads]
        return grads if p.grad is None else [*grads, p.grad]

    def start_maximum(self, world: World, held: list[dict[nn.Parameter, Tensor]]) -> None:
        """Start the all-reduce of the parameters' exponents."""
        self.exponents = _largest([self._shards_of(p, held) for p in self.parameters], world.device)
        if world.size > 1:
            self.work = dist.all_reduce(self.exponents, dist.ReduceOp.MAX, async_op=True)

    def start_sum(self, world: World, shards: int, held: list[dict[nn.Parameter, Tensor]]) -> None:
        """Start the all-reduce of the integers."""
        self._wait()
        self.sums = torch.empty(sum(self.sizes), dtype=torch.int64, device=world.device)
        self.out_of = []
        for p, e, part in zip(self.parameters, self.exponents, torch.split(self.sums, self.sizes), strict=True):
            into, out = scales(e, shards, p.dtype)
            self.out_of.append(out)
            add_fixed(_like(part, p), self._shards_of(p, held), into)
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


def _buckets(model: nn.Module) -> list[_Bucket]:
    """Trainable parameters in reverse order of registration, about the order in which backward delivers them.

    A bucket's sum starts when the next one is full, so a small model is cut into four too: else nothing would overlap.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    most = -(-len(parameters) // _LEAST_BUCKETS)
    buckets: list[list[nn.Parameter]] = [[]]
    room = _BUCKET_BYTES
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if buckets[-1] and (room < size or len(buckets[-1]) == most):
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(p)
        room -= size
    return [_Bucket(parameters) for parameters in buckets if parameters]


def _largest(groups: list[list[Tensor]], device: torch.device) -> Tensor:
    """The exponent of each group of tensors: int32 [groups]; ZERO for an empty group."""
    flat = exponents([t for group in groups for t in group]).to(device)
    out = torch.full((len(groups),), ZERO, dtype=torch.int32, device=device)
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group], dtype=torch.int64, device=device)
    return out.scatter_reduce_(0, index, flat, "amax")


def _summed(tensors: list[Tensor], like: Tensor) -> Tensor:
    return sum(tensors, torch.zeros_like(like, dtype=torch.int64))


def _like(flat: Tensor, p: Tensor) -> Tensor:
    """A flat part seen with a parameter's shape and strides (dense, in any memory format)."""
    return flat.as_strided(p.shape, p.stride(), flat.storage_offset())
