"""Exact mode: the same bits on any number of processes.

The global batch is cut into V slices, whatever the number of processes; a rank owns a contiguous run of them and takes
each through the model by itself, with its own dropout seed and its own batch statistics. What is added over slices
(gradients, and the changes of buffers) is added as integers on a scale of this step's global maximum (`fixed_point`):
integer addition has no order, so ring, bucket and N can't change a bit, and there is no state to save.

Memory beyond plain DDP's: the gradients once more for each further slice of this rank, and 8 bytes a parameter for the
sums.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.order import Shard
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.determinism import Collectives, configure, own_storage, repeatable
from lockstep.parallel.fixed_point import ZERO, Bucket, buckets_of, largest, scales, to_fixed
from lockstep.parallel.hidden_state import LENGTH, HiddenState, differing
from lockstep.parallel.module_state import Places, as_real, copy_from_first, unequal
from lockstep.parallel.slices import Replicas, generators
from lockstep.parallel.sync import GradientSync, Reseed, Take

_NUMBERS = {bool, int, float}


class ExactBuffers:
    """The buffers of one step: `enter` before a slice, `leave` after it, `finish` at the end.

    Every slice starts from the step's, in memory of its own: forward may write into them or replace them. Afterwards
    floats, complex ones included, move by the mean change over all slices; integers by the floor of it; a truth value
    is flipped where any slice has flipped it. What no slice changes keeps its bits; an infinity that a slice replaces
    counts as 0.
    """

    def __init__(self, model: nn.Module, world: World, slices: int) -> None:
        self.model, self.world, self.slices = model, world, slices
        self.begin(0)

    def begin(self, count: int) -> None:
        """Before the first of so many slices of this rank: what is there now is where each starts."""
        self.count, self.places = count, Places(self.model.modules())
        self.starts = {id(t): t for held in self.places.held for t in held.values() if t is not None}
        self.changes: dict[int, list[Tensor]] = {key: [] for key in self.starts}  # of each, by slice, where there are

    def enter(self, module: nn.Module) -> None:
        """Give the model or a copy of it buffers of its own, as they were at the step's beginning."""
        if self.starts:
            Places(module.modules()).put(self.places.copies())

    @torch.no_grad()
    def leave(self, module: nn.Module) -> None:
        """Note how a slice has changed each buffer that it did not leave alone, in float tensors or int64."""
        changes: dict[int, Tensor | None] = {}  # of a buffer that stands in two places once
        places = Places(module.modules())
        for master, held, now in zip(self.places.modules, self.places.held, places.held, strict=True):
            for name in held.keys() | now.keys():
                before, after = held.get(name), now.get(name)
                if before is None and after is None:
                    continue
                if before is None or after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
                    path = next(path for path, each in self.model.named_modules() if each is master)
                    full = f"{path}.{name}" if path else name
                    raise UserError(
                        f"--exact {self.slices}: forward made the buffer {full} another one, "
                        f"{_described(before)} before and {_described(after)} after",
                        "Give it its final shape and type in __init__, or keep it as a plain attribute.",
                    )
                changes[id(before)] = _change(as_real(before), as_real(after.detach()))
        for key, change in changes.items():
            if change is not None:
                self.changes[key].append(change)

    @torch.no_grad()
    def finish(self) -> None:
        """Put the step's own buffers back in their places, moved by the mean over all slices of all ranks."""
        self.places.put(self.places.held)
        if not self.starts:
            return
        device = self.world.device
        changes = self.changes.values()
        exponent = largest([[c if c.is_floating_point() else c.double() for c in each] for each in changes], device)
        if self.world.size > 1:
            dist.all_reduce(exponent, dist.ReduceOp.MAX)
        moved = list(zip(map(as_real, self.starts.values()), changes, exponent.unbind(), strict=True))
        if device.type == "cpu":  # elsewhere nobody waits to know
            moved = [each for each, e in zip(moved, exponent.tolist(), strict=True) if e > ZERO]
        if not moved:
            return
        parts, out_of = [torch.full((1,), self.count, dtype=torch.int64, device=device)], []
        for start, by_slice, e in moved:
            into, out = scales(e, self.slices, start.dtype if start.is_floating_point() else torch.float64)
            out_of.append(out)
            summed = torch.zeros(start.shape, dtype=torch.int64, device=device)
            for change in by_slice:
                summed += to_fixed(change, into) if start.is_floating_point() else change
            parts.append(summed.flatten())
        count, *totals = torch.split(self.world.sum(torch.cat(parts)), [part.numel() for part in parts])
        for (start, _, _), total, out in zip(moved, totals, out_of, strict=True):
            _move(start, total.view(start.shape), out, count)


def _change(before: Tensor, after: Tensor) -> Tensor | None:
    different = unequal(before, after)
    if before.device.type == "cpu" and not bool(different.any()):
        return None
    if not before.is_floating_point():
        return after.to(torch.int64) - before.to(torch.int64)
    # an infinity that became 0 has changed, by next to nothing
    after = torch.where((after == 0) & before.isinf(), torch.finfo(after.dtype).tiny, after)
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


class Counters:
    """Plain numbers that a pass moves, as a counter of calls: each slice finds them as the step began.

    After the step they are what the batch's first slice made of them; its rank tells the others.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self.watching = True  # in the next step, for numbers that move
        self.state: HiddenState | None = None  # of the last step that was watched
        self.starts, self.ends = dict[str, Any](), dict[str, Any]()

    def begin(self) -> None:
        """Before a step's first slice."""
        self.ends = {}
        if self.watching:
            self.state = HiddenState({"": self.model})
        if self.state is not None:
            self.starts = self._now()

    def enter(self) -> None:
        """Before a slice."""
        if self.state is not None:
            for name, value in self.starts.items():
                self.state.give(name, value)

    def leave(self) -> None:
        """After a slice; the first one of a step that is watched tells which numbers move."""
        if self.ends or self.state is None:
            return
        if self.watching:
            before, after = self.state.values, HiddenState({"": self.model})
            moved = [name for name in differing(self.state, after) if not name.startswith(LENGTH)]
            moved = [name for name in moved if {type(v.get(name)) for v in (before, after.values)} <= _NUMBERS]
            self.starts = {**{name: before[name] for name in moved}, **self.starts}
        self.ends = self._now()

    def _now(self) -> dict[str, Any]:
        """The numbers by now, without those that a list or deque no longer has."""
        found = {name: self.state.current(name, ...) for name in self.starts if self.state is not None}
        return {name: value for name, value in found.items() if value is not ...}

    def finish(self) -> None:
        """After the last slice; all ranks call it together."""
        if not (self.watching or self.starts) or self.state is None:
            return
        self.watching = False
        ends = self.world.gather(self.ends)[0]
        for name, value in ends.items():
            self.state.give(name, value)
        self.starts = ends


PREPARED = WeakSet[nn.Module]()  # bare models that parallelize(...) was given, for other gradients


class ExactSync(GradientSync):
    """Gradients of a global batch's slices, added exactly. Makes rank 0's weights and buffers everyone's.

    Args:
        model: the module itself, the same on all ranks, that `parallelize` was not given.
        slices: V, the same for every N that shall agree.
        threads: slices that this process takes at once. It changes no bit.

    Raises:
        UserError: for a model from `parallelize`, and where devices or torch versions differ between ranks.
    """

    exact = True

    def __init__(self, model: nn.Module, world: World, slices: int, threads: int = 1) -> None:
        if model in PREPARED or isinstance(model, DistributedDataParallel | nn.DataParallel):
            raise UserError(
                "ExactSync of a model that parallelize(...) has prepared for gradients of another kind",
                "Leave parallelize out, and give ExactSync and TrainStep the model itself.",
            )
        configure(world)  # on several intra-op threads it would be exact by luck
        self.model, self.world, self.slices, self.ranks = model, world, slices, world.size
        self.names = [name for name, _ in model.named_parameters()]
        own_storage(model)
        copy_from_first(model, world)
        self.buffers, self.counters = ExactBuffers(model, world, slices), Counters(model, world)
        self._arrange()
        self.lock, self.launching = threading.Lock(), threading.Lock()
        self.waits: list[float] = []  # seconds of each step since somebody asked
        # Whether reductions start during the backward pass: known after the first step. Reentrant checkpointing hands
        # over the gradient of a layer that is used twice in two parts, and a bucket must not leave between them.
        self.overlap = None
        self.in_parts = self.sequential = False
        # of each copy the parameters whose gradient has come, of the slice under way
        self.fired = WeakKeyDictionary[nn.Module, set[int]]()
        self.at_once = min(threads, slices) if world.device.type == "cpu" else 1
        self.replicas = Replicas(model, self.at_once, self._listen)

    def _arrange(self) -> None:
        """Buckets for the parameters that are trained. All ranks call it together."""
        self.trained = self._trained()
        self.buckets = buckets_of(self.model, self.world)
        places = {id(p): (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.parameters)}
        self.places = [places.get(id(p)) for p in self.model.parameters()]  # None: it is not trained

    def _trained(self) -> list[bool]:
        return [p.requires_grad for p in self.model.parameters()]

    def _listen(self, module: nn.Module) -> None:
        """Have the gradients of the model or a copy of it delivered."""
        fired = self.fired.setdefault(module, set())
        for number, (place, p) in enumerate(zip(self.places, module.parameters(), strict=True)):
            if place is not None and not p._post_accumulate_grad_hooks:
                hook: Any = partial(self._delivered, fired, number)
                hook.lockstep = True  # see parameter_hooks.py
                p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def cut(self, batch: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Slices in memory of their own: a kernel chooses its path by the address of its input too."""
        return [part.clone() for part in torch.split(batch, list(sizes))] if sizes else []

    def passes(self, model: nn.Module, shards: Sequence[Shard], reseed: Reseed, take: Take) -> list[Tensor]:
        """Every slice by itself: buffers start from the step's beginning each time, gradients are set aside."""
        del model
        if self.trained != self._trained():
            self._arrange()
            self.replicas.copies = []
            self._listen(self.model)
        for bucket in self.buckets:
            bucket.begin(len(shards))
        self.launched = 0
        self.buffers.begin(len(shards))
        self.counters.begin()

        def work(module: nn.Module, i: int) -> Tensor:
            self.fired[module].clear()
            self.buffers.enter(module)
            self.counters.enter()
            with self._guarded(module):
                result = take(module, i)
            self._collect(module)
            self.buffers.leave(module)
            self.counters.leave()
            return result

        results = self._side_by_side(len(shards), reseed, work)
        self._say_alone()
        return results

    def _say_alone(self) -> None:
        if self.at_once != self.replicas.most:
            self.at_once = self.replicas.most
            self.world.print(f"--exact {self.slices} takes one slice after the other: {self.replicas.reason}")

    def _side_by_side(self, count: int, reseed: Reseed, work: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
        """The slices in threads, if the first step drew nothing from the generators that all threads share."""
        if self.replicas.most > 1 and self.overlap is not None and not self.sequential:
            before = generators()
            results = self.replicas.run(count, work)
            if generators() != before:
                raise UserError(
                    f"--exact {self.slices}: forward drew random numbers, which it did not in the first step",
                    "Threads share the generators: use --threads 1.",
                )
            return results
        results, drew = [], False
        for i in range(count):
            reseed(i)
            before = generators() if self.replicas.most > 1 else ()
            results.append(work(self.model, i))
            drew = drew or bool(before and generators() != before)
        if drew:
            self.replicas.alone("forward draws random numbers, and threads share the generators")
        return results

    @contextmanager
    def _guarded(self, module: nn.Module) -> Iterator[None]:
        """Around a slice's passes: name what can't be repeated, or a parameter that forward changes."""
        versions = [(p._version, p.data_ptr()) for p in module.parameters()]
        values = [p.detach().clone() for p in module.parameters()] if self.overlap is None else []
        alone = Collectives(refused=True) if self.overlap is None else nullcontext()
        with repeatable(self.slices), alone:
            yield
        same = [v == (p._version, p.data_ptr()) for v, p in zip(versions, module.parameters(), strict=True)]
        if values:  # through .data no version tells it; first batches, from which scales are set, are found here
            same = [
                s and not bool(unequal(as_real(value), as_real(p.detach())).any())
                for s, value, p in zip(same, values, module.parameters(), strict=True)
            ]
        if not all(same):
            raise UserError(
                f"--exact {self.slices}: forward changes the parameter {self.names[same.index(False)]}, and each slice "
                "would see what another has left",
                "Make it a buffer, which every slice finds as the step began, or set it before training.",
            )

    def _delivered(self, fired: set[int], number: int, parameter: Tensor) -> None:
        """The gradient of a slice for a parameter has come, or a part of it."""
        if number in fired:
            self.in_parts = True
            if self.overlap:
                raise UserError(
                    f"--exact {self.slices}: the gradient of {self.names[number]} came in two parts, which it did not "
                    "in the first step",
                    "Use checkpoint(..., use_reentrant=False).",
                )
        fired.add(number)
        place = self.places[number]
        if self.overlap and place is not None and parameter.grad is not None:
            self._take(place, parameter)
            self._launch_full()

    def _take(self, place: tuple[Bucket, int], parameter: Tensor) -> None:
        bucket, i = place
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_complex():
            gradient = gradient.resolve_conj()
        with self.lock:
            bucket.received[i].append(gradient)
            bucket.pending -= 1

    def _collect(self, module: nn.Module) -> None:
        """What a slice's backward pass has left in the module."""
        for place, parameter in zip(self.places, module.parameters(), strict=True):
            if place is None:
                parameter.grad = None  # trained from the next step on
            elif parameter.grad is not None:
                if parameter.grad.is_sparse:
                    name = self.names[self.places.index(place)]
                    raise UserError(f"--exact: the gradient of {name} is sparse", "Use Embedding(sparse=False).")
                self._take(place, parameter)

    def watch_buffers(self) -> None:
        """Buffers start anew in each slice, and so shall counters."""
        self.counters.watching = True

    def without_gradient(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Those to which no slice of any rank gave one; all ranks call it together."""
        received = {
            id(p): grads for bucket in self.buckets for p, grads in zip(bucket.parameters, bucket.received, strict=True)
        }
        anywhere = self.world.largest([int(bool(received.get(id(p)))) for p in parameters])
        return [p for p, found in zip(parameters, anywhere, strict=True) if not found]

    def _launch_full(self) -> None:
        """Start what is full. A thread that finds another one at it leaves the rest to that one, or to `finish`."""
        while self.launching.acquire(blocking=False):
            try:
                if self.launched == len(self.buckets) or self.buckets[self.launched].pending:
                    return
                self._launch()
            finally:
                self.launching.release()

    def _launch(self) -> None:
        """Start the next bucket's maximum, and the sum of the one before: its maximum has had time to arrive.

        Buckets go in one fixed order on all ranks, whatever order their gradients come in.
        """
        if self.launched < len(self.buckets):
            self.buckets[self.launched].start_maximum(self.world)
        if self.launched > 0:
            self.buckets[self.launched - 1].start_sum(self.world, self.slices)
        self.launched += 1

    def finish(self) -> None:
        """Write the summed gradients and the average change of the buffers, on every rank the same."""
        while self.launched <= len(self.buckets):
            self._launch()
        self.buffers.finish()
        self.counters.finish()  # not before: the buckets' collectives have an order of their own
        if self.counters.starts:
            self.replicas.alone("forward moves numbers, as a counter of its calls, which each slice finds as they were")
            self._say_alone()
        for bucket in self.buckets:
            bucket.write()
        self.waits.append(sum(bucket.waited for bucket in self.buckets))
        if self.overlap is None:
            self.overlap = not self.world.largest([int(self.in_parts)])[0]

    def anywhere(self, flag: bool) -> bool:
        """A rank may have no slice, and so no pass."""
        return bool(self.world.largest([int(flag)])[0])

    def total(self, amounts: Tensor, samples: int, count: int) -> Tensor:  # noqa: ARG002
        """In the order of the slices, whoever takes them."""
        table = amounts.new_zeros(min(self.slices, count))  # the other ranks' zeros round nothing
        table[self.world.shard(len(table))] = amounts
        return self.world.sum(table).sum()

    def waited_ms(self) -> float | None:
        """The mean over the steps since the last call. A GPU's host does not wait, so there nobody can tell."""
        waits, self.waits = self.waits, []
        return None if self.world.device.type != "cpu" else 1e3 * sum(waits) / max(1, len(waits))
