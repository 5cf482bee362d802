"""Exact mode: the same bits on any number of processes.

The global batch is cut into V slices, whatever the number of processes; a rank owns a contiguous run of them and takes
each through the model by itself, with its own dropout seed and its own batch statistics. What is added over slices
(gradients, and the changes of buffers) is added as integers on a scale of this step's global maximum (`fixed_point`):
integer addition has no order, so ring, bucket and N can't change a bit, and there is no state to save.

Memory beyond plain DDP's: the gradients once more for each further slice of this rank, and 8 bytes a parameter for the
sums.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UserError
from lockstep.parallel.buckets import Bucket, buckets_of, largest
from lockstep.parallel.fixed_point import scales, to_fixed
from lockstep.parallel.modules import copy_from_first
from lockstep.parallel.sync import GradientSync
from lockstep.processes.devices import device_name
from lockstep.processes.world import World


def configure(world: World, threads: int) -> None:
    """Make this process's kernels repeatable, and refuse a world whose ranks would round differently.

    Sets the intra-op threads (kernels split their sums by them) and deterministic algorithms; no TF32, no autotuning.

    Raises:
        UserError: where devices, torch versions or thread counts differ between ranks, and on MPS.
    """
    if world.device.type == "mps":
        raise UserError("--exact on mps: its sums are scaled in float64, which MPS has not", "Use --device cpu.")
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
                    f"--exact: {what} is {first} on rank 0 and {theirs[what]} on rank {rank}, which round differently",
                    "Run on machines of one kind with the same software and the same --threads.",
                )


def rounding(device: torch.device) -> dict[str, str | int]:
    """What decides how kernels round beside their input; two runs agree to the bit only where this does."""
    return {"torch": torch.__version__, "device": device_name(device), "CPU threads": torch.get_num_threads()}


class ExactSync(GradientSync):
    """Gradients of a global batch's slices, added exactly.

    Args:
        model: the bare module, the same on all ranks; this makes rank 0's weights and buffers everyone's.
        world: the ranks.
        slices: V, the same for every N that shall agree.
    """

    def __init__(self, model: nn.Module, world: World, slices: int) -> None:
        self.world, self.slices = world, slices
        self.buckets = buckets_of(model)
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        self.counters = [b for b in model.buffers() if not b.is_floating_point() and b.dtype != torch.bool]
        copy_from_first(model, world)
        self.bucket_of: dict[Tensor, Bucket] = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._delivered)  # type: ignore[no-untyped-call]
        self.waits: list[float] = []  # seconds of each step since somebody asked
        self._begin()

    def _begin(self) -> None:
        self.held: list[dict[nn.Parameter, Tensor]] = []  # gradients of this rank's slices but the last
        self.changes: list[list[Tensor]] = []  # of buffers and counters, by slice
        self.launched = 0
        self.listening = False
        for bucket in self.buckets:
            bucket.begin()

    @contextmanager
    def piece(self, size: int, last: bool) -> Iterator[None]:
        """Around one slice's passes: buffers start from the step's beginning each time, gradients are set aside."""
        del size
        before = [b.clone() for b in (*self.buffers, *self.counters)]
        self.listening = last  # the last slice's backward starts the reduction, bucket by bucket
        try:
            yield
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            raise UserError(
                f"--exact {self.slices}: {str(error).splitlines()[0]}",
                "Replace that operator in the model, or train without --exact.",
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
            self.buckets[self.launched - 1].start_sum(self.world, self.slices, self.held)
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

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:
        """In the order of the slices, by a table to which each rank adds its own."""
        del samples
        cuts = min(self.slices, count)
        table = amounts.new_zeros(cuts)
        table[self.world.share(cuts)] = amounts
        return self.world.sum(table).sum()

    def waited_ms(self) -> float | None:
        """The mean over the steps since the last call. A GPU's host does not wait, so there nobody can tell."""
        waits, self.waits = self.waits, []
        return None if self.world.device.type != "cpu" else 1e3 * sum(waits) / max(1, len(waits))

    def _average_changes(self) -> None:
        if not self.buffers and not self.counters:
            return
        floats = [[change[i] for change in self.changes] for i in range(len(self.buffers))]
        whole = [[change[i + len(self.buffers)] for change in self.changes] for i in range(len(self.counters))]
        exponent = largest(floats, self.world.device)
        if self.world.size > 1:
            dist.all_reduce(exponent, dist.ReduceOp.MAX)
        sums, out_of = [torch.tensor([len(self.changes)], device=self.world.device)], []
        for buffer, changes, e in zip(self.buffers, floats, exponent, strict=True):
            into, out = scales(e, self.slices, buffer.dtype)
            out_of.append(out)
            sums.append(_summed([to_fixed(c, into) for c in changes], buffer).flatten())
        sums += [_summed(changes, counter).flatten() for changes, counter in zip(whole, self.counters, strict=True)]
        flat = self.world.sum(torch.cat(sums))
        count, *totals = torch.split(flat, [s.numel() for s in sums])
        for buffer, total, out in zip(self.buffers, totals, out_of, strict=False):
            # one division of the summed changes, in float64: the average over all slices of all ranks
            buffer += (total.to(torch.float64) * out / count).to(buffer.dtype).view_as(buffer)
        for counter, total in zip(self.counters, totals[len(self.buffers) :], strict=True):
            counter += (total // count).to(counter.dtype).view_as(counter)


def _summed(tensors: list[Tensor], like: Tensor) -> Tensor:
    return sum(tensors, torch.zeros_like(like, dtype=torch.int64))
