"""Draws keyed by (seed, step, sample id, which call): the same on any rank, in any piece, on any device.

Which call it is comes from a generator of each piece's own, seeded alike: every call draws its key there. Activation
checkpointing puts torch's generator back before it computes again; the piece's goes with it (`rng_state`), so the same
masks come again, where a counter would go on. What has no batch dimension is the same on all ranks.
"""

import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.draws import kernels
from lockstep.draws.plan import PASSES, Call, Layout, Plan, guess
from lockstep.parallel.batchnorm import batch_norms
from lockstep.parallel.sharded import is_sharded
from lockstep.parallel.untouched import untouched
from lockstep.processes.devices import to_device
from lockstep.randomness import bits, bits_np, stream

Fill = Callable[[Tensor, int], Tensor]  # (keys int64 [b], n) -> values [b, n]


class Recorder:
    """Notes what is drawn, for a plan; the draws are torch's own."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(self, kind: str, shape: Sequence[int], device: torch.device) -> None:
        """Note one call."""
        del device
        self.calls.append((kind, tuple(shape)))


class Keys:
    """The keys of one piece's passes.

    Args:
        draws: whose pass it is.
        model: the module that takes it: the bare one, or a replica.
        step: over the whole run.
        ids: int64 [b], the piece's samples.
        images: what the model is given, for a plan.
    """

    def __init__(self, draws: "Draws", model: nn.Module, step: int, ids: np.ndarray, images: Tensor) -> None:
        self.draws, self.model, self.step, self.ids, self.images = draws, model, step, ids, images
        self.numbers: dict[int, int] = {}  # key of a call -> which call it was when it was first made
        self.bases: dict[tuple[torch.device, bool], Tensor] = {}

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
        if entry is None:
            self.draws.tell(self.model, kind, shape)
        layout = guess(shape, len(self.ids)) if entry is None else entry.layout
        return Stream(bits(key, self._base(device, layout is not None)), tuple(shape), layout)

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

    def __init__(self, keys: Tensor, shape: tuple[int, ...], layout: Layout | None) -> None:
        self.keys, self.shape, self.layout = keys, shape, layout

    def fill(self, fill: Fill) -> Tensor:
        """The values of the call, in its shape."""
        total = 1
        for length in self.shape:
            total *= length
        flat = fill(self.keys, total // len(self.keys))
        if self.layout is None or self.layout.dim == 0:
            return flat.view(self.shape)
        dim = self.layout.dim
        rows_first = (self.shape[dim], *self.shape[:dim], *self.shape[dim + 1 :])
        return flat.view(rows_first).movedim(0, dim)

    def keep(self, p: float) -> tuple[Tensor, float]:
        """A mask that drops with probability `p`, to 2**-16: bool; and what makes up for it on average."""
        rate = kernels.keep_rate(p)
        return self.fill(partial(kernels.keep, p=p)), 1 / rate if rate else 0.0


here = threading.local()  # .keys: who is asked in this thread; .off: nobody, though a backward pass be under way
active: list[Keys | Recorder] = []  # of all threads


def current() -> Keys | Recorder | None:
    """Who is asked for a draw in this thread; None: torch.

    A GPU's backward pass runs in a thread of autograd's, where checkpointed parts draw again.
    """
    if torch.compiler.is_compiling():
        return None
    mine: Keys | Recorder | None = getattr(here, "keys", None)
    if mine is None and len(active) == 1 and not getattr(here, "off", False) and _in_backward():
        return active[0]
    return mine


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class asking:
    """Within, this thread's draws come from `keys`; None: from torch."""

    def __init__(self, keys: Keys | Recorder | None) -> None:
        self.keys = keys

    def __enter__(self) -> None:
        self.before = getattr(here, "keys", None)
        here.keys = self.keys
        if self.keys is None:
            here.off = True
        else:
            active.append(self.keys)

    def __exit__(self, *_: object) -> None:
        here.keys = self.before
        if self.keys is None:
            here.off = False
        else:
            active.remove(self.keys)


class Draws:
    """What a model draws in its training passes, keyed by sample.

    Args:
        seed: the run's.
        compiled: parts of the model are torch.compile's.
    """

    def __init__(self, seed: int, compiled: bool = False) -> None:
        self.seed, self.compiled = seed, compiled
        self.held = False  # torch's functions stay replaced from step to step
        self.plan: Plan | None = None  # made when the first call is: most models draw nothing
        self.refused = ""  # why there is nothing in the plan
        self.told: set[str] = set()
        self.lock = threading.Lock()

    def planned(self, model: nn.Module, images: Tensor) -> Plan:
        """Where the batch is in what the model draws: two forward passes of three and five images, no trace left.

        Batch norms normalise with what they have meanwhile, so that none waits for another rank.

        Raises:
            NotPlanned: for a sharded model that takes no such pass: FSDP would be left in the midst of it.
        """
        with self.lock:
            if self.plan is None:
                sharded = is_sharded(model)  # not to be told in the midst of a pass
                try:
                    self.plan = Plan(*(_recorded(model, images, count) for count in PASSES))
                except NotPlanned as refused:
                    if sharded:
                        raise
                    self.plan, self.refused = Plan([], []), f" ({refused})"
            return self.plan

    def tell(self, model: nn.Module, kind: str, shape: Sequence[int]) -> None:
        """Say once for each module that its draws are keyed by a guess."""
        name = drawing(model)
        if name in self.told:
            return
        self.told.add(name)
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(
                f"{name} draws {kind} of shape {list(shape)}, and passes of {PASSES[0]} and {PASSES[1]} images don't "
                f"tell where the batch is in it{self.refused}: the first dimension is taken for it if the batch "
                "divides that, so these draws may depend on the number of processes",
                stacklevel=2,
            )


class NotPlanned(Exception):
    """A model took no pass of so many images, and why."""


def _recorded(model: nn.Module, images: Tensor, count: int) -> list[Call]:
    """The calls of a forward pass over so many of the images, repeated where they are fewer. Raises NotPlanned."""
    recorder = Recorder()
    with untouched(model), torch.no_grad(), torch.compiler.set_stance("force_eager"), asking(recorder):
        warnings.simplefilter("ignore")  # untouched puts the filters back
        for layer in batch_norms(model):
            layer.training = False
        try:
            model(images[torch.arange(count, device=images.device) % len(images)])
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            first = (str(error).splitlines() or [""])[0]
            raise NotPlanned(f"{count} images: {type(error).__name__}: {first}") from error
    return recorder.calls


def drawing(model: nn.Module) -> str:
    """The module of a model whose forward is under way and came last, by name and class."""
    names = {id(module): name for name, module in model.named_modules()}
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_locals.get("self")
        if id(module) in names:
            return f"{names[id(module)] or 'the model'} ({type(module).__name__})"
        frame = frame.f_back
    return "the model"
