"""Draws keyed by (seed, step, sample id, which call): the same on any rank, in any shard, on any device.

Which call it is comes from a generator of each shard's own, seeded alike: every call draws its key there. Activation
checkpointing puts it back before it computes again (`rng_state`), so the same masks come again.

Word w of a row is SplitMix64's finaliser over key + (w + 1) * GOLDEN, where the keys are hashes themselves: unmixed
ones, as small sample ids, would leave rows visibly correlated. A mask takes four 16-bit draws out of a word.
"""

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.distributed.devices import to_device
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.fsdp import is_sharded
from lockstep.parallel.hidden_state import put_back
from lockstep.parallel.module_state import copy_frozen, preserved_state
from lockstep.randomness import GOLDEN, MIX1, MIX2, bits, bits_np, stream

_BLOCK = 1 << 15  # words worked on at once on the CPU: what its caches hold
_GRAIN = 1 << 16  # masks keep with a probability of so many parts
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # of a uniform number
_steps: dict[torch.device, Tensor] = {}  # (w + 1) * GOLDEN for as many words as were asked for yet


def words(keys: Tensor, count: int) -> Tensor:
    """64 random bits for each place of each row. keys: int64 [b], hashes; returns int64 [b, count]."""
    steps = _golden(keys.device, count)
    if keys.device.type != "cpu":
        z = keys[:, None] + steps
        return _mixed(z, torch.empty_like(z))
    out = torch.empty(len(keys), count, dtype=torch.int64)
    rows = max(1, _BLOCK // max(1, count))
    scratch = torch.empty(min(rows, len(keys)), min(count, _BLOCK), dtype=torch.int64)
    for start in range(0, len(keys), rows):
        for left in range(0, count, _BLOCK):
            z = out[start : start + rows, left : left + _BLOCK]
            torch.add(keys[start : start + rows, None], steps[left : left + _BLOCK], out=z)
            _mixed(z, scratch[: z.shape[0], : z.shape[1]])
    return out


def _golden(device: torch.device, count: int) -> Tensor:
    known = _steps.get(device)
    if known is None or len(known) < count:
        known = _steps[device] = torch.arange(1, count + 1, device=device) * GOLDEN
    return known[:count]


def _mixed(z: Tensor, scratch: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    for by, factor in ((30, MIX1), (27, MIX2), (31, 0)):
        torch.bitwise_right_shift(z, by, out=scratch)
        scratch &= (1 << (64 - by)) - 1  # the shift copies the sign bit
        z ^= scratch
        if factor:
            z *= factor
    return z


def keep_rate(p: float) -> float:
    """The probability with which a mask of drop probability `p` keeps: a multiple of 2**-16."""
    return round((1 - p) * _GRAIN) / _GRAIN


def keep(keys: Tensor, n: int, p: float) -> Tensor:
    """A mask, true with `keep_rate(p)`: bool [b, n]."""
    bits = words(keys, -(-n // 4)).view(torch.int16)[:, :n]
    limit = round(keep_rate(p) * _GRAIN) - _GRAIN // 2
    if limit == _GRAIN // 2:  # 1, which no int16 is below
        return torch.ones_like(bits, dtype=torch.bool)
    return bits < limit


def uniform(keys: Tensor, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in [0, 1), with as many random bits as the dtype has: [b, n]."""
    digits = _DIGITS[dtype]
    return _top(words(keys, n), digits).to(dtype).mul_(2.0**-digits)


def _inner(keys: Tensor, n: int) -> Tensor:
    """Float64 in (0, 1), 0 and 1 left out: [b, n]."""
    return _top(words(keys, n), 52).to(torch.float64).add_(0.5).mul_(2.0**-52)


def normal(keys: Tensor, n: int) -> Tensor:
    """Standard normal numbers, float64 [b, n], by the inverse of the distribution."""
    return _inner(keys, n).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


def exponential(keys: Tensor, n: int) -> Tensor:
    """Exponential numbers of mean 1, above 0: float64 [b, n]."""
    return _inner(keys, n).log_().neg_()


def _top(z: Tensor, digits: int) -> Tensor:
    return (z >> (64 - digits)) & ((1 << digits) - 1)


Fill = Callable[[Tensor, int], Tensor]  # (keys int64 [b], n) -> values [b, n]


# Where the batch is in the shapes that a model draws: found by two small forward passes. A shape that is the same for 3
# samples and for 5 has no batch dimension; one of 3 f and of 5 f holds f rows of each, as the windows of an image.
# "The dimension that is as long as the batch" would take swin's heads for samples as soon as there are as many.
PASSES = 3, 5  # samples; no multiple of one another, and rarely a model's own sizes

Call = tuple[str, tuple[int, ...]]  # what was drawn, of which shape


@dataclass(frozen=True)
class Entry:
    """One call of a forward pass."""

    kind: str
    shape: tuple[int, ...]  # for one sample
    dim: int | None  # that holds the samples, perhaps several rows of each; None: no batch dimension

    def fits(self, kind: str, shape: Sequence[int], samples: int) -> bool:
        """Whether a call in a pass of so many samples may be this one."""
        mine = list(self.shape)
        if self.dim is not None:
            mine[self.dim] *= samples
        return self.kind == kind and mine == list(shape)


class Plan:
    """The calls of a forward pass in their order, of those of passes over PASSES[0] and over PASSES[1] samples."""

    def __init__(self, first: Sequence[Call], second: Sequence[Call]) -> None:
        same = [kind for kind, _ in first] == [kind for kind, _ in second]
        self.entries = [_entry(*pair) for pair in zip(first, second, strict=True)] if same else []

    def find(self, number: int, kind: str, shape: Sequence[int], samples: int) -> Entry | None:
        """The entry of call `number` of a pass over `samples`, or one that all calls of such a shape agree with.

        None where nothing is known of it: another number of calls in each pass, or a shape that follows no batch.
        """
        if number < len(self.entries):
            entry = self.entries[number]
            if entry is not None and entry.fits(kind, shape, samples):
                return entry
        fitting = [entry for entry in self.entries if entry is not None and entry.fits(kind, shape, samples)]
        return fitting[0] if len({entry.dim for entry in fitting}) == 1 else None


def _entry(first: Call, second: Call) -> Entry | None:
    (kind, small), (_, large) = first, second
    if len(small) != len(large):
        return None
    differing = [dim for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if not differing:
        return Entry(kind, small, None)
    dim = differing[0]
    fold, rest = divmod(small[dim], PASSES[0])
    if len(differing) > 1 or rest or large[dim] != fold * PASSES[1]:
        return None
    return Entry(kind, (*small[:dim], fold, *small[dim + 1 :]), dim)


class Recorder:
    """Notes what is drawn, for a plan; the draws are torch's own."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(self, kind: str, shape: Sequence[int], device: torch.device) -> None:
        """Note one call."""
        del device
        self.calls.append((kind, tuple(shape)))


class Keys:
    """The keys of one shard's passes in a step of the run.

    Args:
        model: the bare module, without DDP or what torch.compile returned around it.
        ids, images: int64 [b], the shard's samples, and what the model is given, [b, ...].
    """

    def __init__(self, draws: "Draws", model: nn.Module, step: int, ids: np.ndarray, images: Tensor) -> None:
        self.draws, self.model, self.step, self.ids, self.images = draws, model, step, ids, images
        self.numbers: dict[int, int] = {}  # key of a call -> which call it was when it was first made
        self.bases: dict[tuple[torch.device, bool], Tensor] = {}
        self.unkeyed = 0  # draws that are no sample's, from the generator

    # The rest is made when something is drawn: most models draw nothing.
    @cached_property
    def key(self) -> int:
        """The step's."""
        return stream(self.draws.seed, "draws", self.step)

    @cached_property
    def draw(self) -> tuple[Tensor, np.ndarray]:
        """Where a call's key is drawn, and the same memory for numpy, which reads it without an operator of torch's."""
        memory = torch.empty(1, dtype=torch.int64)
        return memory, memory.numpy()

    @cached_property
    def generator(self) -> torch.Generator:
        """What calls draw their keys from; on the host, as is all that is drawn once for a whole batch."""
        return torch.Generator().manual_seed(self.key)

    def call(self, kind: str, shape: Sequence[int], device: torch.device) -> "Stream":
        """The stream of the next call of a forward pass, or of one that is computed again."""
        plan = self.draws.plan or self.draws.planned(self.model, self.images)
        memory, drawn = self.draw
        memory.random_(generator=self.generator)
        key = int(drawn[0])
        number = self.numbers.setdefault(key, len(self.numbers))
        entry = plan.find(number, kind, shape, len(self.ids))
        guess = 0 if shape and shape[0] and shape[0] % len(self.ids) == 0 else None  # if the batch divides it
        dim = guess if entry is None else entry.dim
        return Stream(bits(key, self._base(device, dim is not None)), tuple(shape), dim)

    def _base(self, device: torch.device, by_sample: bool) -> Tensor:
        """A hash for each sample, or one for all: int64 [b] or [1] on the device."""
        found = self.bases.get((device, by_sample))
        if found is None:
            ids = self.ids if by_sample else np.zeros(1, np.int64)
            hashes = torch.empty(len(ids), dtype=torch.int64)
            hashes.numpy()[:] = bits_np(self.key + (not by_sample), ids).view(np.int64)
            found = self.bases[device, by_sample] = to_device(hashes, device)
        return found


class Stream:
    """The random numbers of one call: a key for each sample, or one where there is no batch dimension."""

    def __init__(self, keys: Tensor, shape: tuple[int, ...], dim: int | None) -> None:
        self.keys, self.shape, self.dim = keys, shape, dim

    def fill(self, fill: Fill) -> Tensor:
        """The values of the call, in its shape."""
        flat = fill(self.keys, math.prod(self.shape) // len(self.keys))
        dim = self.dim or 0
        if dim == 0:
            return flat.view(self.shape)
        rows_first = (self.shape[dim], *self.shape[:dim], *self.shape[dim + 1 :])
        return flat.view(rows_first).movedim(0, dim)

    def keep(self, p: float) -> tuple[Tensor, float]:
        """A mask that drops with probability `p`, to 2**-16: bool; and what makes up for it on average."""
        rate = keep_rate(p)
        return self.fill(partial(keep, p=p)), 1 / rate if rate else 0.0


here = threading.local()  # .keys: who is asked in this thread
active: list[Keys | Recorder] = []  # of all threads


def current() -> Keys | Recorder | None:
    """Who is asked for a draw in this thread; None: torch.

    A GPU's backward pass runs in a thread of autograd's, where checkpointed parts draw again.
    """
    if torch.compiler.is_compiling():
        return None
    mine: Keys | Recorder | None = getattr(here, "keys", None)
    if mine is None and len(active) == 1 and torch._C._current_graph_task_id() != -1:
        return active[0]
    return mine


class Draws:
    """What a model, parts of which may be torch.compile's, draws in its training passes, keyed by sample."""

    def __init__(self, seed: int, compiled: bool = False) -> None:
        self.seed, self.compiled = seed, compiled
        self.plan: Plan | None = None  # made when the first call is: most models draw nothing
        self.lock = threading.Lock()

    def planned(self, model: nn.Module, images: Tensor) -> Plan:
        """Where the batch is in what the model draws: two forward passes of three and five images, no trace left.

        Batch norms normalise with what they have meanwhile, so that none waits for another rank.

        Raises:
            NotPlanned: for a sharded model that takes no such pass: FSDP would be left in the midst of it.
        """
        with self.lock:
            if self.plan is None:
                sharded = is_sharded(model)  # can't be seen in the midst of a pass
                try:
                    self.plan = Plan(*(_recorded(model, images, count) for count in PASSES))
                except NotPlanned:
                    if sharded:
                        raise
                    self.plan = Plan([], [])
            return self.plan


class NotPlanned(Exception):
    """A model took no pass of so many images, and why."""


def _recorded(model: nn.Module, images: Tensor, count: int) -> list[Call]:
    """The calls of a forward pass over so many of the images, repeated where they are fewer. Raises NotPlanned."""
    recorder = Recorder()
    # what the pass writes are copies; variables of the model's code, which have none, are put back
    with put_back({"": model}), preserved_state(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # preserved_state puts the filters back
        copy_frozen(model)
        for layer in batch_norms(model):
            layer.training = False
        before, here.keys = getattr(here, "keys", None), recorder
        active.append(recorder)
        try:
            model(images[torch.arange(count, device=images.device) % len(images)])
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise NotPlanned(f"{count} images: {type(error).__name__}: {first}") from error
        finally:
            here.keys = before
            active.remove(recorder)
    return recorder.calls
