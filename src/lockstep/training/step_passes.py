"""A training step's passes, taken by one process alone, put back, and compared.

A parameter's gradients are apart by the norm of their difference, relative to the gradient or, for a small one, to a
part of all gradients. How much of that is rounding depends on the type in which a model computes.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.config.execution import Law
from lockstep.data.loaders import Batch
from lockstep.data.order import Shard
from lockstep.distributed.world import World, pretended_process, pretended_rank
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import GroupBatchNorm, StepBatchNorm, SyncBatchNorm, batch_norms, without_ranks
from lockstep.parallel.fsdp import LOW, is_sharded, local
from lockstep.parallel.hidden_state import LENGTH, HiddenState, differing, is_of_the_process, same
from lockstep.parallel.module_state import as_real, driven, is_compiled, replaced
from lockstep.parallel.parameter_hooks import ParameterHooks
from lockstep.parallel.sync import GradientSync
from lockstep.training.outcomes import HELD, UNREPEATED, Finding, Outcome, minus, norms_of
from lockstep.training.precision import at_least

# by the type in which a model computes: a relative difference that is never looked at closer, how far inputs are
# moved to see what rounding does, below which part of all gradients one is measured by these, what is beyond doubt
_LIMITS = {
    torch.float64: (1e-8, 2.0**-49, 1e-6, 1e-6),
    torch.float32: (2e-5, 2.0**-20, 1e-3, sys.float_info.max),
    torch.float16: (1e-2, 2.0**-10, 1e-2, math.inf),
    torch.bfloat16: (5e-2, 2.0**-7, 1e-2, math.inf),
}
_LOW = {*LOW.values()}
NOISE = 32.0  # times what moved inputs do
TRIES = 3  # moves of all inputs: a maximum that is taken elsewhere, or not, may go with any of them
_WILD = 1e-2  # a difference with moved inputs by which one asks whether it is for the moves
_ASKED = 3  # checks for which the answer holds: it takes a pass
_FRESH = 10  # checks for which what moves have done is taken for what they would do now

# how far a gradient of each parameter, and the loss, are from themselves with inputs moved by a seed, or not at all
Moves = Callable[[int | None], tuple[Tensor, float]]


class _LowTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, the types of low precision that operators return are noted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen |= {leaf.dtype for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.dtype in _LOW}
        return found


class Step(Protocol):
    """What is used of a TrainStep here."""

    model: nn.Module
    bare: nn.Module
    loss: Any
    optimizer: torch.optim.Optimizer
    hooks: ParameterHooks
    sync: GradientSync
    parameters: list[nn.Parameter]
    named: dict[str, nn.Parameter]
    autocast: Any
    autocast_dtype: torch.dtype | None
    whole_batch: bool
    draws: Any
    host_generators: Any
    before_pass: Callable[[int], object] | None
    passes_write: bool | None
    checks_mean: bool
    apart: bool
    own_loop: bool
    compares: bool

    def take_passes(self, batch: Batch) -> list[Tensor]:
        """Forward and backward of a batch's shards; gradients stay in the parameters."""

    def take_gradients(self) -> list[Tensor | None]:
        """The parameters' gradients, of which they have none afterwards."""

    def give_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """The inverse of `take_gradients`."""

    def require_gradients(self) -> None:
        """Raise UserError where a parameter has none after a pass."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, Python looks for no garbage: the states that a check makes would have it walk all that was ever imported,
    a tenth of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepPasses:
    """A step's passes, to be taken by this process alone and measured."""

    law: Law
    # of each kind the first finding, and whether it is the first of all, which alone is worth a line
    report: Callable[[Finding, bool], object]

    def __init__(self, step: Step) -> None:
        self.step, self.bare, self.devices = step, step.bare, driven(step.bare)
        self.rank, self.ranks = dist.get_rank() if step.sync.ranks > 1 else 0, step.sync.ranks
        self.world = World(self.rank, self.ranks, self.rank, self.ranks, torch.device("cpu"), "")
        self.gather = self.world.gather
        self.start: HiddenState  # before the step that is compared
        self.dtypes = set[torch.dtype]()
        self.computes_in({p.dtype.to_real() for p in step.named.values()} | {step.autocast_dtype or torch.float64})
        self._types_known = False  # also the low ones that the model computes in by itself
        # to a low one in full precision too: TorchScript does not ask the functions that Python sees
        scripts = any(isinstance(m, torch.jit.ScriptModule) for m in step.bare.modules())
        self.casts_itself: bool | None = True if scripts else None
        self.checked, self.at = 0, 0  # steps so far, and the last of them
        self._noise: tuple[int, Tensor, float] | None = None  # of which check; of each gradient and of the loss
        self._ask_at = 0  # which check asks next whether a pass comes to the same again
        self.repeatable = self._asks = all(device.type == "cpu" for device in self.devices)
        self.compiled = any(map(is_compiled, step.bare.modules()))
        self.pretends = not any(isinstance(m, nn.SyncBatchNorm) for m in step.bare.modules())  # it would ask the others
        self.evaluated: HiddenState | None = None  # before an evaluation that moved more than buffers
        self.evaluations = 0  # which did that
        self.versions: dict[str, int] = {}  # of the parameters that nothing has written into since

    def computes_in(self, dtypes: set[torch.dtype]) -> None:
        """Measure by the coarsest of all types that were seen: of parameters, of autocast, of the loss."""
        self.dtypes |= dtypes
        kinds = (_LIMITS.get(each, _LIMITS[torch.float32]) for each in self.dtypes)
        self.limit, self.moved_by, self.least, self.sure = max(kinds)

    def _of_parameters(self, place: int, least: float) -> Tensor:
        """float64 [parameters]: what `_LIMITS` has in this place of those of low precision, and no less than `least`.
        In full precision too their gradients are rounded."""
        own = [_LIMITS[p.dtype][place] if p.dtype in _LOW else 0.0 for p in self.step.named.values()]
        return torch.tensor(own, dtype=torch.float64).clamp(min=least)

    def learn_types(self, take: Callable[[], object]) -> bool:
        """Where something differs for the first time: look for low types in which the passes compute, as by an autocast
        in forward or around the step. Whether limits have changed. All ranks call it together."""
        if self._types_known:
            return False
        self._types_known, before = True, self.limit
        self.computes_in(self._low_types(take))
        return self.limit != before

    def _low_types(self, take: Callable[[], object]) -> set[torch.dtype]:
        with _LowTypes() as types:
            take()
        everyones = {name for names in self.gather([*map(str, types.seen)]) for name in names}
        return {each for each in _LOW if str(each) in everyones}

    @property
    def low(self) -> bool:
        """Whether the passes compute in a low type, and may be taken in another one."""
        return not self.dtypes.isdisjoint(_LOW) and not self.casts_itself

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Within, the passes compute in no low type, by autocast or a cast, and limits are those of the other types."""
        kept, noise = self.dtypes, self._noise
        self.dtypes, self._noise = set(), None
        self.computes_in(kept - _LOW | {torch.float32})
        try:
            with ExitStack() as stack:
                for kind in {device.type for device in self.devices}:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                stack.enter_context(replaced(self.step, autocast=nullcontext))
                stack.enter_context(replaced(torch, set_autocast_enabled=lambda *_: None))
                vars(self.step)["take_passes"] = at_least(torch.float32, self.step.take_passes)
                stack.callback(vars(self.step).pop, "take_passes")
                yield
        finally:
            self.dtypes, self._noise = set(), noise
            self.computes_in(kept)

    def compared_in_full(
        self, batch: Batch, own: Callable[[], Outcome], take: Callable[[int | None], Outcome]
    ) -> list[Finding]:
        """In full precision: what the step's own parts and those that `take` takes come to. Of low precision rounding
        is as large as half a gradient. All ranks call it together."""
        passed, joined = list[Outcome](), (lambda each: each) if is_sharded(self.step.model) else self.summed
        with self.in_full_precision():
            with suppress(Exception):  # no room, or code that counts on a type
                passed = [own(), take(None)]
            if not all(self.gather(bool(passed))):
                self.step.take_gradients()
                self.casts_itself = True
                return []
            whole, other = map(joined, passed)
            found = self._compared(batch, whole, other, [lambda seed: self.apart(other, joined(take(seed)))] * TRIES)
            # gradients of low parameters are low as well, and measured so
            low_parameters = any(p.dtype in _LOW for p in self.step.named.values())
            self.casts_itself = bool(found and not low_parameters and self._low_types(lambda: take(None)))
        return [] if self.casts_itself else found

    def versions_now(self) -> dict[str, int]:
        """How often each parameter was written into."""
        return {name: p._version for name, p in self.step.named.items()}

    def state(self) -> HiddenState:
        """What the model and the loss keep, and the parameters that forward has written into, as they are now."""
        named, versions = self.step.named, self.versions_now()
        found = HiddenState({"": self.bare, "the loss": self.step.loss}, self.devices)
        for name, p in named.items():
            if versions[name] != self.versions.get(name):
                found.keep_parameter(name, p)
        return found

    def of_loss(self) -> set[str]:
        """What of a state's names is the loss's."""
        return {*HiddenState({"the loss": self.step.loss}).values}

    def group(self) -> int:
        """Samples that only pass together, as those of a batch norm over groups."""
        return max((m.group for m in self.bare.modules() if isinstance(m, GroupBatchNorm)), default=1)

    @contextmanager
    def by_itself(self, rank: int = 0, ranks: int = 1, other_threads: bool = False) -> Iterator[None]:
        """Within, passes of the step reach no other rank, and find themselves rank `rank` of `ranks`.

        `other_threads`: with another number of them, as processes have that share cores otherwise.
        """
        step, threads = self.step, torch.get_num_threads()
        # other shapes would be compiled again, for minutes
        eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        pretends = self.pretends and (ranks > 1 or dist.is_initialized())
        there = pretended_rank(rank, ranks) if pretends else nullcontext()
        alone = replaced(step, model=step.bare, sync=GradientSync(), apart=True)
        if other_threads:
            torch.set_num_threads(threads - 1 or 2)
        try:
            with alone, eager, without_ranks(), pretended_process(1000 + rank), there:
                yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)

    def kept_otherwise(self, here: HiddenState, there: HiddenState) -> list[str]:
        """What two states hold otherwise, beside buffers and the process's generators."""
        own = {name for name, _ in self.bare.named_buffers()}
        norms = tuple(f"{path}." for path, module in self.bare.named_modules() if isinstance(module, StepBatchNorm))
        names = [name for name in differing(here, there) if name not in own and not is_of_the_process(name)]

        def near(name: str) -> bool:  # weights that forward has normalised once more differ in the last bit
            if name not in self.step.named or name not in here.values.keys() & there.values.keys():
                return False
            a, b = here.values[name], there.values[name]
            return a.shape == b.shape and torch.allclose(a, b, atol=0, rtol=1e-6)

        return [name for name in names if not (name.startswith(norms) or near(name))]

    def shifted(self, images: Tensor, seed: int) -> Tensor:
        """Images that are moved in the last places of what the model computes with."""
        signs = torch.randint(0, 2, images.shape, generator=torch.Generator().manual_seed(seed))
        if self.dtypes == {torch.float64}:  # then the model makes them such of float32's itself
            images = images.double()
        return images * (1 + (signs.to(images) * 2 - 1) * self.moved_by)

    def summed(self, some: Outcome) -> Outcome:
        """Of all ranks' passes; some's gradients are used up."""
        if self.ranks == 1:
            return some
        whole, pending = [*some.gradients], [dist.all_reduce(some.loss, async_op=True)]
        for i, p in enumerate(self.step.named.values()):
            if p.requires_grad:
                whole[i] = each = torch.zeros_like(p) if (own := whole[i]) is None else own.to_dense()
                pending.append(dist.all_reduce(each, async_op=True))
        for work in pending:
            work.wait()
        return Outcome(whole, some.loss, some.state)

    def apart(self, a: Outcome, b: Outcome, of: Outcome | None = None) -> tuple[Tensor, float]:
        """float64 [parameters] on the host: each gradient's relative difference; and the loss's. Of NaN: infinite.

        `of`: a and b are parts of this one, of which each rank has some.
        """
        difference = norms_of(minus(x, y) for x, y in zip(a.gradients, b.gradients, strict=True))
        if of is None:
            norms, losses = torch.maximum(a.norms, b.norms), [float(v[0] / (v[1] or 1.0)) for v in (a.loss, b.loss)]
            away, largest = abs(losses[0] - losses[1]), max(map(abs, losses))
        else:
            summed = torch.cat([difference**2, (a.loss - b.loss)[:1].abs()])
            if self.ranks > 1:
                dist.all_reduce(summed)
            norms, difference, away, largest = of.norms, summed[:-1].sqrt(), float(summed[-1]), abs(float(of.loss[0]))
        total = norms.norm()
        least = self._of_parameters(2, self.least) * total
        size = difference / torch.maximum(norms, least) if total > 0 else difference * 0
        loss = away / largest if largest else 0.0
        return size.nan_to_num(nan=math.inf), math.inf if math.isnan(loss) else loss

    def compared(self, batch: Batch, actual: Outcome, other: Outcome, moves: Sequence[Moves]) -> list[Finding]:
        """Where gradients, or else the loss, differ by more than rounding: the first gradient in the model's order.

        `moves`, as many as it takes to explain what differs: of the other's passes, the first one of a part of them,
        perhaps.
        """
        found, before = self._compared(batch, actual, other, moves), self.limit
        if found and not self._types_known:
            if types := self._other_types(batch, partial(moves[-1], None)):
                return types
            if self.limit != before:
                self._noise = None
                found = self._compared(batch, actual, other, moves)
        return found

    def _other_types(self, batch: Batch, again: Callable[[], object]) -> list[Finding]:
        """Whether a process alone computes in other low types than one of two with other threads, than with half as
        many samples, or than `again`; if not, limits are for these types from now on."""

        def take(part: int, rank: int, ranks: int, other_threads: bool) -> None:
            self.start.restore()
            with self.by_itself(rank, ranks, other_threads):
                self.step.take_passes(_of_largest(batch, part))
            self.step.take_gradients()

        hows = [(1, 0, 0, False), (1, 1, 2, True), *[(2, 0, 0, False)] * (not self.step.whole_batch)]
        alone = [] if is_sharded(self.step.model) else [self._low_types(partial(take, *how)) for how in hows]
        types = self._low_types(again)
        cause = "whether the model computes in low precision follows the rank, or the number of processes or threads:"
        if others := {kind for each in alone for kind in each ^ types}:
            names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in others))
            return [Finding(batch.step, "types", names, math.inf, cause)]
        self._types_known = True
        self.computes_in(types)
        return []

    def _compared(self, batch: Batch, actual: Outcome, other: Outcome, moves: Sequence[Moves]) -> list[Finding]:
        size, loss = self.apart(actual, other)
        limits = self._of_parameters(0, self.limit)
        if not (bool((size > limits).any()) or loss > self.limit):
            return []
        noise, loss_noise = torch.zeros_like(size), 0.0
        if self._noise and self.checked - self._noise[0] <= _FRESH:
            _, noise, loss_noise = self._noise

        def unexplained() -> Tensor:
            # what turns one unit off may turn off one of any layer: none is quieter than all gradients together
            overall = float((noise * other.norms).norm() / other.norms.norm().clamp(min=1e-300))
            return (size > torch.maximum(noise.clamp(min=overall) * NOISE, limits)) | size.isinf()

        for number, move in enumerate(moves if batch.images.is_floating_point() else ()):
            if not unexplained().any() and loss <= max(self.limit, NOISE * loss_noise):
                break
            each, of_loss = move(len(moves) * batch.step + number)
            wild = (largest := float(each.max())) > _WILD
            # a drift as smooth as a clock's would be explained as well; of rounding, moved inputs do far more
            asks = not number and self._asks and float(size.max()) > largest / 4
            if asks or (wild and self.checked >= self._ask_at):
                same, _ = moves[-1 if wild else number](None)  # a coin may fall alike for a part
                least = self.limit if wild else max(self.limit, largest / 4)
                for name, apart in zip(self.step.named, same.tolist(), strict=True):
                    if least < apart < math.inf:  # what isn't finite isn't itself either
                        return [Finding(batch.step, "gradient", name, apart, UNREPEATED)]
                self._asks = False
                self._ask_at = self.checked + _ASKED * wild
            kept = (noise, loss_noise) if number else (each, of_loss)
            noise, loss_noise = torch.maximum(kept[0], each), max(kept[1], of_loss)
            self._noise = (self.checked, noise, loss_noise) if float(noise.max()) <= _WILD else None
        for name, value, apart in zip(self.step.named, size.tolist(), unexplained().tolist(), strict=True):
            if apart:
                return [Finding(batch.step, "gradient", name, value)]
        differs = loss > max(self.limit, NOISE * loss_noise) or math.isinf(loss)
        return [Finding(batch.step, "loss", "", loss)] if differs else []

    def loss(self, found: Sequence[Tensor], shards: Sequence[Shard], everywhere: bool = True) -> Tensor:
        """float64 [2] of what a step's passes return, over all ranks."""
        terms = torch.zeros(2, dtype=torch.float64)
        for value, shard in zip(found, shards, strict=True):
            value = value.detach().double().cpu()
            terms += value if value.ndim else torch.stack([value * shard.size, value * 0])
        if everywhere and self.ranks > 1:
            dist.all_reduce(terms)
        return terms

    def buffer_names(self, normed: bool) -> list[str]:
        """Of the buffers that are compared: of batch norms none that follows a rank's own samples."""
        names, norms = [], set(batch_norms(self.bare))
        for path, module in self.bare.named_modules():
            if module not in norms or (normed and isinstance(module, SyncBatchNorm)):
                names += [f"{path}.{name}".lstrip(".") for name, b in module._buffers.items() if b is not None]
        return names

    def other_bits(self, some: list[Tensor | None], others: list[Tensor | None]) -> str:
        """The first parameter whose gradients differ in a bit."""
        for name, a, b in zip(self.step.named, some, others, strict=True):
            if (a is None) != (b is None) or (a is not None and b is not None and not same(local(a), local(b))):
                return name
        return ""

    def moved_in_evaluation(self, batch: Batch, now: HiddenState) -> list[Finding]:
        """Whether a step follows what the evaluation before it has moved, by the samples of one process."""
        if self.evaluated is None or self.step.sync.exact or is_sharded(self.bare):  # these are not taken alone
            return []
        names = self.left_by_evaluation(now)
        return self.matters(batch, names, now, self.evaluated) if names else []

    def left_by_evaluation(self, now: HiddenState) -> list[str]:
        """What the evaluation before this step has moved, of the model; parameters and the loss it leaves alone."""
        others = self.step.named.keys() | self.of_loss()
        before = [] if self.evaluated is None else self.kept_otherwise(now, self.evaluated)
        return [name for name in before if name not in others]

    def matters(self, batch: Batch, names: list[str], here: HiddenState, there: HiddenState) -> list[Finding]:
        """Whether the next pass gives something else from one state than from the other, whose buffers are the same."""
        if held := [name for name in names if name in here.generators]:  # by luck the next draws may come to the same
            return [Finding(batch.step, "generator", held[0], math.inf, HELD)]
        follows = "it follows the samples of one process, and nobody puts it together"
        both = here.values.keys() & there.values.keys() & self.step.named.keys()
        for name in [name for name in names if name in both][:1]:  # what is written again may come to the same
            a, b = (as_real(state.values[name]).double() for state in (here, there))
            return [Finding(batch.step, "state", name, float((a - b).norm() / a.norm().clamp(min=1e-300)), follows)]
        step, one = self.step, replace(_of_largest(batch), step=batch.step + 1)
        largest, norms = 0.0, batch_norms(self.bare)
        for frozen in (False, True) if norms else (False,):  # a shift that is every sample's is lost in a batch norm
            outcomes = []  # with the draws of another step, which a cache of drawn masks would keep from coming
            for state in (here, there):
                here.restore()  # what it has alone, as parameters that forward writes into, is the same before each
                state.restore()
                for name in {name for name, _ in self.bare.named_buffers()} & here.values.keys():
                    state.give(name, here.values[name])
                for layer in norms if frozen else ():
                    layer.training = False
                with self.by_itself():
                    found = step.take_passes(one)
                    outcomes.append(Outcome(step.take_gradients(), self.loss(found, one.shards), state))
            size, loss = self.apart(*outcomes)
            largest = max(largest, float(size.max()), loss)
        if largest <= self.limit * (1e-3 if self.repeatable else 1.0):
            return []
        return [Finding(batch.step, "state", named(names[0]), largest, follows)]

    def by_time(self, found: Finding, state: HiddenState, others: Iterable[HiddenState]) -> Finding:
        """What was found in the state that a part left, time its cause where it leaves another one by and by."""
        moves = any(found.place in map(named, self.kept_otherwise(state, other)) for other in others)
        return replace(found, cause=UNREPEATED) if moves else found

    def ranges(self, batch: Batch) -> list[list[tuple[int, int]]]:
        """[ranks][shards] (start, stop): each rank's rows of the global batch."""
        mine = [[shard.rows.start, shard.rows.stop] for shard in batch.shards]
        return [[(start, stop) for start, stop in each] for each in self.gather(mine)]


def _of_largest(batch: Batch, part: int = 1) -> Batch:
    """The largest of a batch's shards, or the first half of it and so on."""
    i, shard = max(enumerate(batch.shards), key=lambda each: each[1].size)
    first, size = sum(each.size for each in batch.shards[:i]), max(shard.size // part, min(shard.size, 2))
    rows, own = slice(first, first + size), slice(shard.rows.start, shard.rows.start + size)
    shards = (replace(shard, rows=own),)
    return replace(batch, images=batch.images[rows], labels=batch.labels[rows], shards=shards)


def named(name: str) -> str:
    """What a user would call it: which element of a container has moved differs with the parts."""
    return name.removeprefix(LENGTH).partition("[")[0]


comparing = WeakSet[StepPasses]()  # of all training steps that there are
_told = WeakSet[nn.Module]()  # of all models, the ones that it was said of


@contextmanager
def note_evaluation(model: nn.Module, world: World) -> Iterator[list[str]]:
    """Within, a model is evaluated. What moves more than buffers has the model's next step compared: the first such
    evaluation, the second, fourth, eighth and so on. All ranks call it together.

    Yields a list for the names of what one batch of it leaves to the next: that is said, once for a model.
    """
    passes, follows = [each for each in comparing if each.bare is model], list[str]()
    before = HiddenState({"": model} if passes else {})
    yield follows
    # asked by all: a step that nobody holds any longer may live on for a while on some ranks
    found = world.gather([bool(passes and differing(before, HiddenState({"": model}))), *follows])
    if (names := [name for _, *each in found for name in each]) and model not in _told:
        _told.add(model)
        likely = [each for each in comparing if type(each.bare) is type(model)]  # a moving average no step trains
        finding = Finding(likely[0].at if likely else 0, "evaluation", named(names[0]), math.inf)
        if any(each.law == "strict" for each in likely):
            raise UserError(f"--law strict: {finding.message}", "Mend that, or give --law warn.")
        if likely and not likely[0].step.own_loop:
            likely[0].report(finding, True)
        elif world.rank == 0:
            print(f"note: {finding.message}", file=sys.stderr)
    if any(moved for moved, *_ in found):
        for each in passes:
            each.evaluations += 1
            if each.evaluations & (each.evaluations - 1) == 0:
                each.evaluated, each.step.compares = before, True
