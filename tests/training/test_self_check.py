"""What makes a step another one on another number of processes is said, with its place and cause; nothing else is."""

import gc
import io
import itertools
import math
import os
import random
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as early
from torch.utils.checkpoint import checkpoint

from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import TrainLoader, reader
from lockstep.data.order import Order
from lockstep.distributed.failures import is_peer_gone
from lockstep.distributed.world import World, shard_of
from lockstep.errors import UserError
from lockstep.parallel.hidden_state import HiddenState
from lockstep.parallel.strategy import parallelize
from lockstep.training.assemble import loaders
from lockstep.training.batch_rows import cut
from lockstep.training.evaluation import evaluate
from lockstep.training.outcomes import UNREPEATED, Finding, Outcome, norms_of
from lockstep.training.step import TrainStep
from lockstep.training.step_passes import note_evaluation
from tests.hostile.runs import neutral
from tests.ranks import run_ranks
from tests.training.test_equal_steps import CLASSES, FEATURES, HIDDEN, MODELS, Contrast, Net, batch_of, contrastive

SIZES = (12, 12, 9, 12, 12, 5)
pytestmark = pytest.mark.filterwarnings(r"ignore:(std|var)\(\). degrees of freedom", "ignore:.torch.jit.script. is dep")


def case(cause: str = "", place: str = "", what: str = "", **rest: Any) -> Callable[[type], type]:
    """Notes what is expected of a class."""

    def noted(kind: type) -> type:
        kind.expected = {"cause": cause, "place": place, "what": what, **rest}  # type: ignore[attr-defined]
        CASES[kind.__name__] = kind
        return kind

    return noted


CASES: dict[str, type] = {}


class Odd(Net):
    """A net with one odd layer; `odd(x)`, a method of the layer, says what it does."""

    passes: Tensor
    lstm: nn.Module

    def begin(self) -> None:
        self.layer: nn.Module = Layer(self)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.layer(x)))

    def odd(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Layer(nn.Module):
    def __init__(self, owner: Odd) -> None:
        super().__init__()
        self.odd: Any = type(owner).odd

    def forward(self, x: Tensor) -> Any:
        return self.odd(self, x)


@case("layer (Layer): what it computes for a sample depends on which others pass with it")
class Spread(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x / x.std()


@case("layer (Layer): what it computes for a sample")
class Pairs(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return torch.cat([part - part.mean(0) * 0.3 for part in x.split(2)])


@case("layer (Layer): what it computes for a sample")
class Capacity(Odd):
    def odd(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return x * (order.argsort() < 2).view(-1, 1)


@case("layer (Layer): it draws from torch's generator")
class Early(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return early(x, 0.5)


@case("layer (Layer): it draws from numpy's generator")
class NumpyRows(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.random.rand(len(x), 1) + 0.5)


@case("layer (Layer): it draws from Python's generator")
class PythonRows(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * torch.tensor([random.random() for _ in x], dtype=x.dtype).view(-1, 1)


@case("layer (Layer): what it computes for a sample depends on which others pass with it")
class Blocks(Odd):
    """DropBlock's scale: the draws are those of samples, how many are kept is the batch's."""

    def odd(self, x: Tensor) -> Tensor:
        kept = torch.empty_like(x).bernoulli_(0.8)
        return x * kept * (kept.numel() / kept.sum())


@case("layer (Layer): it draws from torch's generator")
class Halves(Odd):
    """Draws that are no sample's, beside some that are."""

    def odd(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1) * torch.randint(1, 3, (len(x), 1))


_OWN = torch.Generator().manual_seed(1)


@case("a generator that the model holds", "_OWN", what="generator")
class OwnGenerator(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, generator=_OWN, dtype=x.dtype) < 0.9)


@case("statistics over the samples that pass together")
class OwnNorm(Net):
    def begin(self) -> None:
        self.norm = OddNorm(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.norm(x)))


class OddNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt() * self.weight + self.bias


@case("what its samples do to it on several processes comes to something else", "norm.running_mean", "buffer")
class MomentumBySize(Net):
    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        if self.training:
            self.norm.momentum = len(x) / 50
        return torch.tanh(self.second(self.norm(x)))


@case("a backward hook on it", "second")
class BackwardHook(Net):
    def begin(self) -> None:
        self.second.register_full_backward_hook(lambda module, before, after: (before[0] / before[0].norm(),))


@case("the model: torch.jit compiled it")
class Scripted(nn.Module):
    def __new__(cls) -> Any:
        return torch.jit.script(nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout()).double())


@case("something in the backward pass", "second.weight")
class NodeHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.node = torch.autograd.graph.get_gradient_edge(self.second.weight).node  # that adds up its gradient
        self.node.register_prehook(lambda gradients: (gradients[0] / gradients[0].norm(),))


@case("something in the backward pass")
class OwnBackward(Odd):
    def odd(self, x: Tensor) -> Tensor:
        (y := x.clone()).register_hook(lambda gradient: gradient / gradient.norm())
        return y


@case("", "largest", what="buffer")
class Largest(Net):
    """A buffer that is the largest norm seen, beside what nothing uses."""

    largest: Tensor

    def begin(self) -> None:
        self.register_buffer("largest", torch.ones(()))

    def middle(self, x: Tensor) -> Tensor:
        self.seen, y = x.detach(), torch.tanh(self.second(x)) / self.largest
        self.largest = torch.maximum(self.largest, x.detach().sum(0).abs().max())
        return y


@case("", "queue", what="state")
class Queue(Net):
    """Features of earlier batches."""

    def begin(self) -> None:
        self.queue = deque([torch.ones(HIDDEN, dtype=torch.float64)], 4)

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x - torch.stack([*self.queue]).mean(0)))
        self.queue.extend(x.detach()[:2])
        return y


@case("it follows the samples of one process", "queue", what="state")
class QueueBeforeNorm(Queue):
    """What the queue adds to every sample is lost in a batch norm, until ranks add what is each one's own."""

    def begin(self) -> None:
        super().begin()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(self.norm(x - torch.stack([*self.queue]).mean(0))))
        self.queue.extend(x.detach()[:2])
        return y


@case("", "seen", what="state")
class SeenInAttribute(Net):
    def begin(self) -> None:
        self.seen = 0

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x)) / (1 + self.seen / 50)
        self.seen += len(x)
        return y


@case("layer (Layer): what it computes", starts=3)
class Gated(Odd):
    """Looks at its batch from the fourth pass on."""

    def begin(self) -> None:
        super().begin()
        self.layer.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def odd(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x - x.mean(0) * (self.passes > 3)


@case("layer (Layer): what it computes")
class BySize(Odd):
    """Takes another path for large batches."""

    def odd(self, x: Tensor) -> Tensor:
        return x * 2 if len(x) > 8 else x


@case("takes no", what="pass", only=(1,))
class Fixed(Odd):
    def odd(self, x: Tensor) -> Tensor:
        if len(x) not in (12, 9, 5, 4, 3, 1):
            raise ValueError(f"takes no batch of {len(x)}")
        return x


@case("with another number of threads")
class ByThreads(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * torch.get_num_threads())


@case("with another process id")
class ByProcess(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + os.getpid() % 2)


@case("with another rank")
class ByRank(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + (torch.distributed.is_initialized() and torch.distributed.get_rank()))


@case("the same samples give something else with another number of processes")
class ByNumber(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x * (1 + (dist.get_world_size() if dist.is_initialized() else 1))


@case("low precision follows the rank, or the number", "bfloat16", what="types")
class LowAmongSeveral(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x) if dist.is_initialized() and dist.get_world_size() > 1 else x


@case("low precision follows the rank, or the number", "bfloat16", what="types")
class LowOfFew(Odd):
    def odd(self, x: Tensor) -> Tensor:
        return x.bfloat16().to(x) if len(x) < 10 else x


@case("what it computes for a sample depends on which others pass with it")
class Together(Odd):
    """A collective of the model's own: the check's parts are no passes of all ranks."""

    def odd(self, x: Tensor) -> Tensor:
        mean = x.mean(0).detach()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean = mean / torch.distributed.get_world_size()
        return x - mean


@case("it follows the samples of one process", "masks", what="state")
class MasksBySize(Net):
    def begin(self) -> None:
        self.masks: dict[int, Tensor] = {}

    def middle(self, x: Tensor) -> Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = (torch.rand(len(x), HIDDEN) < 0.8).to(x)
        return torch.tanh(self.second(x)) * self.masks[len(x)]


@case("the processes hold different values of", only=(2, 3))
class Diverged(Net):
    def begin(self) -> None:
        self.scale = 1.0 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * self.scale


@case("layer.lstm (LSTM): it draws from torch")
class Lstm(Odd):
    def begin(self) -> None:
        super().begin()
        self.layer.lstm = nn.LSTM(1, 1, 2, batch_first=True, dropout=0.5)

    def odd(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0][..., 0]


@case("it follows the samples of one process", "table.weight", what="state")
class Renormed(Net):
    """The rows of a table that samples ask for are written anew, to the same effect if they are asked for again."""

    def begin(self) -> None:
        self.table = nn.Embedding(64, HIDDEN, max_norm=0.5)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) + self.table((x.sum(1) * 97).long().abs() % 64)


@case("the model: what it computes for a sample", "at step 1 ")
class EveryFifth(Net):
    """Regularised on steps 0, 5, 10, ..., of which the first alone is one that is checked; in float32."""

    def begin(self) -> None:
        self.number = 0
        self.double = self.float  # type: ignore[method-assign]

    def middle(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.second(x))
        self.number += self.training
        return y - y.mean(0) if self.number % 5 == 1 else y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Synced(Net):
    """torch's own layer, which asks the other ranks where there are any."""

    def begin(self) -> None:
        self.norm = nn.SyncBatchNorm(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.norm(x)))


def found(
    world: World,
    make: Callable[[], nn.Module],
    loss: Any = F.cross_entropy,
    sizes: Sequence[int] = SIZES,
    **options: Any,
) -> list[Any]:
    """What is reported of some steps; what is said comes first, and is one sentence."""
    torch.manual_seed(0)
    model = parallelize(make(), world)
    trained = [p for p in model.parameters() if p.requires_grad]
    step = TrainStep(model, loss, torch.optim.SGD(trained, 0.1, momentum=0.5), **options)
    findings: list[Finding] = []

    def report(finding: Finding, first: bool) -> None:
        assert first == (not findings)
        findings.append(finding)

    step.check.report = report
    for t, n in enumerate(sizes):
        step(batch_of(world, n, t))
    return [(each.what, each.place, each.cause, each.message) for each in findings]


def everything(world: World) -> dict[str, Any]:
    here = {name: kind for name, kind in CASES.items() if world.size in kind.expected.get("only", (1, 2, 3))}  # type: ignore[attr-defined]
    return {name: found(world, kind) for name, kind in here.items()}


@cache
def on(n: int) -> list[dict[str, Any]]:
    return [everything(World.single())] if n == 1 else run_ranks(everything, n, timeout=120, law=True)


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_what_depends_on_the_number_of_processes_is_said_on_any_number_of_them(n: int) -> None:
    otherwise = {}
    for rank in on(n):
        for name, findings in rank.items():
            expected = CASES[name].expected  # type: ignore[attr-defined]
            (what, _, cause, message), *_ = findings or [("", "", "", "silent")]
            if not (expected["cause"] in cause and expected["place"] in message and expected["what"] in what):
                otherwise[name] = findings
    assert otherwise == {}


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_sentence_is_said_in_the_same_words_on_any_number_of_processes(n: int) -> None:
    everywhere = [name for name, kind in CASES.items() if "only" not in kind.expected]  # type: ignore[attr-defined]
    said = {name: {neutral(rank[name][0][3]) for each in (1, n) for rank in on(each)} for name in everywhere}
    assert {name: sentences for name, sentences in said.items() if len(sentences) > 1} == {}


class Squeezed(Odd):
    """Loses the batch dimension of a single sample."""

    def odd(self, x: Tensor) -> Tensor:
        return x + x.squeeze().mean(1, keepdim=True)


class Skipping(Odd):
    """Uses its layer for several samples alone."""

    def odd(self, x: Tensor) -> Tensor:
        return x

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) if len(x) > 1 else x


class Following(Net):
    """Frozen weights follow others, in forward."""

    def begin(self) -> None:
        self.slow = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.lerp_(self.second.weight, 0.1)
        return torch.tanh(self.second(x)) + torch.tanh(self.slow(x))


class Initialised(Net):
    """The first pass gives parameters their values, through .data, of which no version tells; each replaces one."""

    done: Tensor

    def begin(self) -> None:
        self.scale, self.shift = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("done", torch.zeros(()))

    def middle(self, x: Tensor) -> Tensor:
        if not self.done:
            self.scale.data.copy_(1 / x.std(0))
            self.done.fill_(1)
        self.shift.data = self.shift.data * 1.00001
        return torch.tanh(self.second(x * self.scale + self.shift))


class Counted(nn.Module):
    """A loss that counts its calls."""

    calls = 0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, labels)


def refused(world: World, first: int, make: type[Net], accumulate: int = 1) -> str:
    """What a step on so many samples says of a net."""
    torch.manual_seed(0)
    model = parallelize(make(), world)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    try:
        step(batch_of(world, first, 0, accumulate))
    except UserError as error:
        return f"{error} {error.remedy}"
    except RuntimeError as error:
        if not is_peer_gone(error):
            raise
    return ""


def test_a_model_that_takes_no_single_sample_is_refused_on_any_number_of_processes() -> None:
    (sentence,) = {refused(World.single(), 12, Squeezed), *run_ranks(refused, 2, 12, Squeezed, law=True)}
    assert sentence.startswith("the model takes no single sample, which a part of a short batch may be: Index")
    batched = {"forward": lambda self, x: F.batch_norm(Net.forward(self, x), None, None, training=True)}
    assert "in place of torch.nn.functional's" in refused(World.single(), 12, type("Batched", (Net,), batched))
    assert sentence in run_ranks(refused, 3, 4, Squeezed, law=True)  # shares of two, one and one: the step itself fails
    assert refused(World.single(), 7, Squeezed, 4) == sentence  # micro-batches of two and one


def test_what_a_single_sample_leaves_out_is_refused_on_one_process() -> None:
    said = refused(World.single(), 12, Skipping)
    assert "2 parameter(s) took no part in the loss: second.weight, second.bias" in said


def test_what_forward_writes_into_weights_and_what_the_loss_counts_is_put_back() -> None:
    loss = Counted()
    assert found(World.single(), Following, loss) == []
    assert loss.calls == len(SIZES)


def written(law: Any) -> list[float]:
    torch.manual_seed(0)
    model = Initialised()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), law=law)
    step.check.report = lambda finding, first: None
    for t, n in enumerate(SIZES):
        step(batch_of(World.single(), n, t))
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_what_forward_writes_through_data_is_put_back() -> None:
    assert written("warn") == written("off")


def test_nothing_is_said_of_models_that_are_equal() -> None:
    assert {make.__name__: each for make in MODELS if (each := found(World.single(), make))} == {}
    assert found(World.single(), Contrast, contrastive, whole_batch=True) == []
    assert found(World.single(), Contrast, lambda y, z: F.cross_entropy(y["logits"], z), whole_batch=True) == []
    seen = [0.0]

    def counting(y: Any, labels: Tensor) -> Tensor:
        seen[0] += len(labels)
        return contrastive(y, labels) * (1 + seen[0] / 100)

    assert found(World.single(), Contrast, counting, whole_batch=True) == []
    assert found(World.single(), Synced) == []


class Alone(Net):
    """From its ninth pass on it takes a single sample otherwise than several."""

    def begin(self) -> None:
        self.passes = 0

    def middle(self, x: Tensor) -> Tensor:
        self.passes += 1
        return torch.tanh(self.second(x)) * (0.5 if self.passes > 8 and len(x) == 1 else 1)


def test_every_fourth_check_passes_a_single_sample_by_itself() -> None:
    assert found(World.single(), Alone, sizes=[10] * 8) == []
    assert "at step 9 the gradient of" in found(World.single(), Alone, sizes=[10] * 9)[0][-1]


class OutOfReach(Net):
    """Each pass is another one, by what nobody can put back: a generator, as the clock would be."""

    def begin(self) -> None:
        self.scales = (0.5 + i % 5 for i in itertools.count())

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x)) * next(self.scales)


class Drifting(OutOfReach):
    def begin(self) -> None:
        self.scales = (1 + i / 1000 for i in itertools.count())  # as smooth as rounding's noise


class Timed(Net):
    last = 0.0  # kept, and so put back

    def middle(self, x: Tensor) -> Tensor:
        scale, self.last = 1 + self.last % 1, time.perf_counter()
        return torch.tanh(self.second(x)) * scale


def repeated(world: World) -> set[str]:
    several = [found(world, OutOfReach), found(world, Drifting), found(world, Timed)[:1]]  # what is said comes first
    return {cause for each in several for _, _, cause, _ in each or [(0, "", "silent", 0)]}


def test_what_is_another_one_at_times_is_tried_more_than_once() -> None:
    model = Timed()
    check = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)).check
    before, model.last = check.state(), 1.0
    for later, cause in ((check.state(), UNREPEATED), (before, "")):
        others = [before, before, later]
        assert check.by_time(Finding(0, "state", "last", 1.0), before, others).cause == cause


def test_what_is_another_one_each_time_does_not_pass_as_rounding() -> None:
    assert repeated(World.single()) == {UNREPEATED}
    assert run_ranks(repeated, 2, law=True) == [{UNREPEATED}] * 2


class InSingle(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Autocast(Net):
    """Computes in bfloat16 by itself."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x.float()).float()


class Casts(InSingle):
    """A layer with weights in bfloat16, another one that casts."""

    def begin(self) -> None:
        self.low = nn.Linear(FEATURES, FEATURES).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.low(x.to(torch.bfloat16)))


def in_low_precision(world: World) -> list[Any]:
    """What is said of models that compute in bfloat16, and of those whose samples see each other there."""
    said, centred = [], {"middle": lambda self, x: torch.tanh(self.second(x - x.mean(0)))}
    kinds: list[tuple[type[Net], dict[str, Any]]] = [(InSingle, {"precision": "bf16"}), (Autocast, {}), (Casts, {})]
    for kind, options in kinds:
        for make in (kind, type("Centring", (kind,), centred)):
            said.append([each[:3] for each in found(world, partial(_in_float32, make), **options)])
    casting = {"middle": lambda self, x: torch.tanh(self.second(x.bfloat16()))}  # which fails without autocast
    made = type("Casting", (InSingle,), casting)
    drawing = {"middle": lambda self, x: checkpoint(self.dropped, x, use_reentrant=False), "dropped": _dropped}
    drawn = found(world, partial(_in_float32, type("Dropping", (Casts,), drawing)))
    return [*said, found(world, partial(_in_float32, made), precision="bf16"), [each[2] for each in drawn]]


def _dropped(self: Net, x: Tensor) -> Tensor:
    return early(torch.tanh(self.second(x)), 0.5, self.training)


def _in_float32(make: type[nn.Module]) -> nn.Module:
    model = make().float()
    if isinstance(model, Casts):
        model.low.bfloat16()
    return model


def test_low_precision_hides_nothing_and_is_no_finding() -> None:
    said = in_low_precision(World.single())
    cause = "the model: what it computes for a sample depends on which others pass with it"
    unkeyed = "the model: it draws from torch's generator by a function whose draws are not keyed by sample"
    assert said == [*([[], [("gradient", "first.weight", cause)]] * 3), [], [unkeyed]]
    assert run_ranks(in_low_precision, 2, law=True) == [said] * 2


class Centred(Net):
    """The second batch norm's mean is one of values that the first has centred: nothing but rounding."""

    def begin(self) -> None:
        self.norms = nn.ModuleList([nn.BatchNorm1d(HIDDEN), nn.BatchNorm1d(HIDDEN)])
        nn.init.zeros_(self.second.bias)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norms[1](self.second(self.norms[0](x))))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.head.weight.dtype))


class Offset(Net):
    """A batch norm of values that lie far from 0: the rounding of their mean is a part of their spread."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.second(x) + 1000))


def rounding(world: World) -> list[str]:
    said, f32, f64 = list[str](), torch.float32, torch.float64
    types = (f32, f32, f32), (f64, f64, f64), (f64, f32, f64), (f64, f64, f32), (torch.bfloat16, f32, f32)
    for make, (dtype, given, into) in [*((Centred, each) for each in types), (Offset, types[0])]:
        torch.manual_seed(0)
        model = parallelize(make().to(dtype), world)
        loss = lambda outputs, labels, into=into: F.cross_entropy(outputs.to(into), labels)  # noqa: E731
        step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), 0.1))
        step.check.report = lambda finding, _: said.append(finding.message)
        for t in range(5):
            batch = batch_of(world, 24, t)
            step(replace(batch, images=batch.images.to(given)))
    return said


def test_what_only_rounding_moves_is_no_finding() -> None:
    assert rounding(World.single()) == []
    assert run_ranks(rounding, 2, law=True) == [[], []]


class Ghost(Net):
    """Normalises four samples at a time."""

    def begin(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in super().middle(x).repeat(2, 1).split(4)])[: len(x)]


class Bare(Ghost):
    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) if len(x) > 1 else x


class Rare(Net):
    """Uses a layer in the first of two micro-batches alone."""

    def begin(self) -> None:
        self.passes = 0

    def middle(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x if self.passes == 2 else super().middle(x)


class Exits(Net):
    """Uses a layer where one sample is among those that pass; and keeps their covariance, which ranks put together."""

    covariance: Tensor

    def begin(self) -> None:
        self.register_buffer("covariance", torch.eye(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.covariance.lerp_(h.detach().T @ h.detach() / len(h), 0.1)
        return self.head(torch.tanh(self.second(h)) if x.max() > 2.1 else h)


@pytest.mark.parametrize(
    ("make", "accumulate", "sentence"),
    [
        # the other rank waits in its collective until this one is gone
        pytest.param(Exits, 1, "2 parameter(s) took no part in the loss: second.weight", marks=pytest.mark.slow),
        (Ghost, 1, "batch norm is called more often for some samples than for others: a process would wait for"),
        (Rare, 2, "2 parameter(s) took no part in the loss: second.weight, second.bias"),
        (Bare, 1, "4 parameter(s) took no part in the loss: second.weight, second.bias, norm.weight, norm.bias"),
    ],
)
def test_what_some_shares_leave_out_is_refused_on_any_number_of_processes(
    make: type[Net], accumulate: int, sentence: str
) -> None:
    (said,) = {
        refused(World.single(), 12, make, accumulate),
        *run_ranks(refused, 2, 12, make, accumulate, law=True),
    } - {""}
    assert said.startswith(sentence)


def hard_half(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the half with the largest losses, whose value parts hardly move, unlike their gradients."""
    losses = F.cross_entropy(outputs, labels, reduction="none")
    hard = losses.topk(max(1, len(losses) // 2)).values
    return hard.sum(), hard.new_tensor(len(hard))


def noised(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs + torch.from_numpy(np.random.rand(*outputs.shape)), labels)


@pytest.mark.parametrize(
    ("loss", "cause"),
    [
        (hard_half, "the loss: that of a batch is not the mean over its samples'"),
        (noised, "the loss: it draws from numpy's generator by a function whose draws are not keyed by sample"),
    ],
)
def test_a_loss_that_differs_is_named_by_its_slopes_and_draws(loss: Any, cause: str) -> None:
    (what, _, said, _), *_ = found(World.single(), Net, loss)
    assert (what, said) == ("gradient", cause)


class Taken(Net):
    taken = 0  # samples that have passed together

    def forward(self, x: Tensor) -> Tensor:
        self.taken = len(x)
        return super().forward(x)


HOOKS: tuple[Callable[..., Any], ...] = (
    lambda sgd, *_: sgd.param_groups[0].update(lr=1e-3 * time.perf_counter()),
    lambda sgd, *_: sgd.param_groups[0].update(lr=0.1 * (dist.get_world_size() if dist.is_initialized() else 1)),
    lambda sgd, *_: (dist.is_initialized() and dist.get_rank()) or sgd.param_groups[0]["params"][0].data.mul_(0.9),
    lambda sgd, *_: sgd.param_groups[0].update(lr=0.01 * sgd.param_groups[0]["net"].taken),
    lambda sgd, *_: [
        dist.all_reduce(p.data.div_(dist.get_world_size()))
        for p in sgd.param_groups[0]["params"] * dist.is_initialized()
    ],
)


class Remembers(torch.optim.SGD):
    """Steps back now and then, by what it keeps; draws noise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.slow = getattr(self, "slow", None) or [p.detach().clone() for p in params]
        self.count = getattr(self, "count", 0) + 1
        super().step(closure)
        for p, slow in zip(params, self.slow, strict=True):
            p.data.add_(0.01 * torch.randn_like(p))
            if self.count % 2 == 0:
                p.data.copy_(slow.lerp_(p.data, 0.5))


class Lookahead(torch.optim.Optimizer):
    """Holds an optimizer that takes the steps, and goes halfway back to its own weights after every second one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, defaultdict(dict)
        self.defaults, self.count = inner.defaults, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.data = slow.lerp_(p.data, 0.5).clone()


class Compiled(nn.Module):
    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.inner(x) * (1 + self.passes)


class Cycling(Net):
    """Forward takes the next one of some numbers from an iterator, and freezes a layer in every third pass.

    Another part was compiled by torch.jit.
    """

    def begin(self) -> None:
        self.passes, self.scales, self.signs = 0, itertools.cycle([1.0, 0.5, 2.0]), [itertools.count()]
        self.compiled = torch.jit.script(Compiled())

    def middle(self, x: Tensor) -> Tensor:
        self.passes += self.training
        self.second.requires_grad_(self.passes % 3 > 0)
        return torch.tanh(self.compiled(self.second(x))) * next(self.scales)


class Means(torch.optim.SGD):
    """Goes by the mean of the last gradients, which it keeps in a list of its state."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            last = self.state[p].setdefault("last", [])
            last.append(p.grad.clone())
            p.grad = torch.stack(last[-3:]).mean(0)
        return super().step(closure)


class Counts(torch.optim.SGD):
    """Counts its steps in a tensor of a parameter group, as timm's Lamb does, and those of all in its class."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0].setdefault("step", torch.zeros(())).add_(1)
        type(self).count += 1
        for p in (p for p in self.param_groups[0]["params"] if p.grad is not None):
            p.grad /= float(self.param_groups[0]["step"]) + self.count
        return super().step(closure)


def held(world: World, law: Any) -> list[tuple[list[float], list[str]]]:
    """Weights after steps of an optimizer that holds another, and of one with lists, and what is said."""
    found, Counts.count = [], 0
    for make in (lambda *args, **options: Lookahead(torch.optim.SGD(*args, **options)), Means, Counts):
        torch.manual_seed(0)
        model, said = parallelize(Cycling(), world), list[str]()
        step = TrainStep(model, F.cross_entropy, make(model.parameters(), 0.1, momentum=0.9), law=law)
        step.check.report = lambda finding, _, said=said: said.append(finding.message)  # type: ignore[misc]
        for t, n in enumerate(SIZES):
            step(batch_of(world, n, t))
        found.append((torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), said))
    return found


def test_checks_leave_an_optimizer_within_another_lists_and_an_iterator_as_they_were() -> None:
    one = held(World.single(), "off")
    assert held(World.single(), "warn") == one
    for rank in run_ranks(held, 2, "warn", law=True):
        for (weights, said), (expected, _) in zip(rank, one, strict=True):
            assert np.abs(np.subtract(weights, expected)).max() < 1e-11
            assert said == []


def updated(world: World) -> list[list[str]]:
    """What is said of updates, by a hook on a step of torch's optimizer, or by an optimizer of its own; and weights."""
    found = []
    for hook, kind in (*((hook, torch.optim.SGD) for hook in HOOKS), (None, Remembers)):
        torch.manual_seed(0)
        model = parallelize(net := Taken(), world)
        optimizer = kind(model.parameters(), 0.1, momentum=0.5)
        optimizer.param_groups[0]["net"] = net
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer.register_step_post_hook(hook or (lambda *_, schedule=schedule: schedule.step()))
        step, said = TrainStep(model, F.cross_entropy, optimizer), list[str]()

        def report(finding: Finding, first: bool, said: list[str] = said) -> None:
            said += [neutral(finding.message)] if first else []

        step.check.report = report
        for t, n in enumerate(SIZES):
            step(batch_of(world, n, t))
        found.append(said)
    off = TrainStep(model, F.cross_entropy, optimizer, law="off")
    off(batch_of(world, 12, 6))
    return [*found, [str(optimizer.count), str(schedule.last_epoch)]]  # type: ignore[attr-defined]


def test_updates_that_depend_on_process_or_time_are_said_and_others_leave_no_trace() -> None:
    said = {str(rank) for rank in [updated(World.single()), *run_ranks(updated, 3, law=True)]}
    differ = "weights will differ with the number of process: at step # the update"
    what = "depends on the process, on how many there are, or on the time, first in"
    lr, first = ([f"{differ} {what} {name}"] for name in ("lr of parameter group #", "first.weight"))
    left = [f"{differ} follows what the sample of one process leave in taken"]
    assert said == {str([lr, lr, first, left, [], [], ["7", "14"]])}  # of Remembers as its own, and as SGD's


def noisy(world: World, draws: bool, seeded: bool = False) -> list[str]:
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(0) if seeded else None
    model = parallelize(Net(), world)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    said, given = list[str](), weakref.WeakSet[Tensor]()
    step.check.report = lambda finding, _: said.append(neutral(finding.message))
    for t, n in enumerate(SIZES):
        batch = batch_of(world, n, t)
        batch._loaded = batch._contents()
        if draws:
            noise = torch.randn(batch.images.shape, generator=own, dtype=batch.images.dtype)
            batch = replace(batch, images=batch.images + 0.1 * noise)
        else:
            batch.images.mul_(2)
            with torch.random.fork_rng():
                torch.manual_seed(1)
        given.add(batch.images)
        step(batch)
    assert len(given) == 1, "looking for generators keeps no batch"
    return said


def test_images_that_a_loop_changes_by_random_numbers_are_said() -> None:
    said = [noisy(World.single(), True), *run_ranks(noisy, 2, True, law=True)]
    assert said == [said[0]] * 3
    cause = "the batch is not as the loader gave it, and was changed by random numbers of"
    assert f"{cause} torch's generator" in said[0][0]
    assert f"{cause} own" in noisy(World.single(), True, seeded=True)[0]
    assert noisy(World.single(), False) == []


def divided(world: World) -> list[Any]:
    """DDP's mean is not made a sum again."""
    with mock.patch("lockstep.parallel.ddp.torch._foreach_mul_"):
        return found(world, Net)


class Calibrated(Odd):
    """Begins with its first batch's spread, which a single sample has none of."""

    scale: Tensor

    def begin(self) -> None:
        super().begin()
        self.layer.register_buffer("scale", torch.zeros(HIDDEN))

    def odd(self, x: Tensor) -> Tensor:
        if not self.scale.any():
            self.scale = 1 / x.detach().std(0)
        return x * self.scale


class Overflows(Net):
    """Comes to no number on any number of processes."""

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) * math.inf


def started(world: World) -> list[list[str]]:
    """What is said of a first step on four samples in two micro-batches: of three ranks some have a single one."""
    found = []
    for make, dtype in ((Calibrated, torch.float32), (Calibrated, torch.float64), (Overflows, torch.float64)):
        torch.manual_seed(0)
        model = parallelize(make().to(dtype), world)
        step, said = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), list[str]()
        step.check.report = lambda finding, _, said=said: said.append(neutral(finding.message))  # type: ignore[misc]
        batch = batch_of(world, 4, 0, accumulate=2)
        step(replace(batch, images=batch.images.to(dtype)))
        found.append(said)
    return found


def test_a_step_that_is_finite_on_one_process_alone_is_said_on_any_number() -> None:
    alone, *others = started(World.single()), *run_ranks(started, 3, timeout=120, law=True)
    assert others == [alone] * 3
    (single,), (double,), none = alone
    assert none == []
    for sentence in (single, double):
        assert "not finite there; layer (Layer): what it computes for a sample depends on which others" in sentence


def test_a_set_that_is_put_back_keeps_its_order() -> None:
    collide = {7, 15}  # the first one's place is the second one's too
    order, state = list(collide), HiddenState({"": {"names": collide}})
    state.restore()
    assert list(collide) == order
    collide.add(3)
    state.restore()
    assert collide == {7, 15}


@pytest.mark.slow
def test_a_fault_of_the_steps_own_is_said_too() -> None:
    for said in run_ranks(divided, 2, law=True):
        assert said[0][0] == "gradient"


class ByPlace(Augment):
    """Draws for an image by its place in the batch."""

    def __call__(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        return super().__call__(images, torch.arange(len(ids)), epoch)


class OfRank(Augment):
    def __call__(self, images: Tensor, ids: Tensor, epoch: int | None) -> Tensor:
        return super().__call__(images, ids, epoch) * (1 + int(os.environ.get("RANK", "0")))


def augmented(world: World, kind: type[Augment]) -> list[str]:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), dtype=np.uint8)
    images = ArraySet("noise", ("a", "b", "c"), (0.5,), (0.2,), (pixels,), np.arange(40) % 3, "noise")
    order, augment = Order(40, 12, 0), kind((0.5,), (0.2,), 7, crop_padding=2, flip=True)
    train = TrainLoader(images, order, augment, world, reader(images, world.device))
    torch.manual_seed(0)
    model = parallelize(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), world)
    step, said = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), list[str]()
    step.check.report = lambda finding, _: said.append(neutral(finding.message))
    for epoch in train.epochs(2):
        for batch in epoch:
            step(batch)
    return said


def test_an_image_that_follows_its_batch_or_process_is_said() -> None:
    kinds: dict[type[Augment], str] = {ByPlace: "in its batch than made by itself", OfRank: "by the process's rank"}
    for kind, cause in kinds.items():
        first, *others = augmented(World.single(), kind), *run_ranks(augmented, 2, kind, law=True)
        assert others == [first, first]
        assert f"an image is another one {cause}" in "".join(first)
    assert augmented(World.single(), Augment) == []
    assert run_ranks(augmented, 2, Augment, law=True) == [[], []]


def out_of_step(world: World, way: str) -> str:
    model = parallelize(nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES).double()), world)
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    pictures = torch.randn(8, 1, 1, FEATURES, dtype=torch.float64), torch.arange(8) % CLASSES
    _, val = loaders((pictures, pictures), world, batch_size=4, workers=0)
    try:
        for t, n in enumerate((12, 12, 9, 12, 12, 12, 12)):
            if (t, world.rank) == (5, 1):
                if way != "continue":
                    break
                continue
            step(batch_of(world, n, t))
        world.gather(1.5) if way == "gather" else evaluate(model, val, world)
    except UserError as error:
        return str(error)
    except RuntimeError as error:
        if not is_peer_gone(error):
            raise
    return ""


@pytest.mark.parametrize(
    ("way", "places"),
    [
        ("continue", "rank 0 is at step 6, rank 1 is at step 7"),
        ("break", "rank 0 is at step 6, rank 1 is at an evaluation"),
        ("gather", "rank 0 is at step 6, rank 1 is at a world.gather"),
    ],
)
def test_processes_that_no_longer_take_the_same_steps_are_refused(way: str, places: str) -> None:
    sentences = {each for each in run_ranks(out_of_step, 2, way, law=True) if each}
    assert len(sentences) == 1
    assert f"the processes no longer take the same steps: {places}" in sentences.pop()


def decided(world: World, accumulate: int) -> list[float]:
    """A loop that lowers its rate by the loss, and ends by it."""
    torch.manual_seed(0)
    model = parallelize(Net(), world)
    step, means = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1)), list[float]()
    for t, n in enumerate((12, 9, 12, 5, 12, 9, 12, 12)):
        batch = batch_of(world, n, t, accumulate)
        means.append(float(step(batch)))
        if len(means) > 1 and means[-1] > means[-2]:
            step.optimizer.param_groups[0]["lr"] *= 0.5
        if means[-1] < means[0]:
            break
    return means


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_loop_decides_by_its_loss_is_the_same_on_any_number_of_processes(accumulate: int) -> None:
    alone, *others = decided(World.single(), accumulate), *run_ranks(decided, 3, accumulate, law=True)
    assert others == [others[0]] * 3
    assert others[0] == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_looked_for_within_a_check_and_python_goes_on_as_before(enabled: bool) -> None:
    """A collection of all that was ever imported takes as long as hundreds of small steps."""
    model, seen = Net(), io.StringIO()  # which no check puts back
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    was, during = gc.isenabled(), list[str]()
    model.register_forward_pre_hook(lambda *_: print("on" if gc.isenabled() else "off", file=seen))
    try:
        (gc.enable if enabled else gc.disable)()
        for number in range(4):  # the last one is not checked
            step(batch_of(World.single(), 12, number))
            assert gc.isenabled() == enabled
            during.append(seen.getvalue())
            seen.truncate(seen.seek(0))
    finally:
        (gc.enable if was else gc.disable)()
    assert [{*each.split()} for each in during] == [{"off"}] * 3 + [{"on" if enabled else "off"}]
    assert all(each.count("off") > 1 for each in during[:3])


def test_what_may_be_rounding_is_said_when_it_was_seen_twice_in_one_place() -> None:
    model = Net().float()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    places = ("second.weight", "first.bias", "head.weight", "first.bias")
    news = [step.check._is_news(Finding(t, "gradient", place, 1e-3)) for t, place in enumerate(places)]
    assert news == [False, False, False, True]


def test_strict_raises_and_off_looks_at_nothing() -> None:
    with pytest.raises(UserError, match=r"weights will differ with the number of processes: at step 1 the gradient of"):
        found(World.single(), Spread, law="strict")
    assert found(World.single(), Spread, law="off") == []


class Prototypes(Net):
    def begin(self) -> None:
        self.bank: list[Tensor] = []

    def middle(self, x: Tensor) -> Tensor:
        if not self.training:
            self.bank.append(x.detach().mean(0))
        return torch.tanh(self.second(x - sum(self.bank) / max(1, len(self.bank))))


class Shown(Net):
    """Keeps what it shows of any batch, and writes into a parameter in training: both follow no samples."""

    def begin(self) -> None:
        self.slow = nn.Parameter(torch.ones(()), requires_grad=False)

    def middle(self, x: Tensor) -> Tensor:
        self.shown = x.detach()
        self.slow.mul_(0.9 if self.training else 1)
        return torch.tanh(self.second(x)) * (1 + self.slow)


@pytest.mark.parametrize("make", [Prototypes, Shown])
def test_what_an_evaluation_moves_is_said_where_the_next_step_follows_it(make: type[Net]) -> None:
    model, said = make(), list[tuple[int, str, str]]()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    step.check.report = lambda finding, _: said.append((finding.step, finding.what, finding.place))
    for t in range(12):
        step(batch := batch_of(World.single(), 12, t))
        if t >= 4:
            with note_evaluation(model, World.single()):
                model.eval()(batch.images)
            model.train()
    assert said == ([(5, "state", "bank")] if make is Prototypes else [])
    assert step.check.checked == 7, "0, 1, 2, 4 and 8; after the first evaluation, the second and the fourth, before 8"


class Carries(nn.Linear):
    """Evaluates a batch by the one before it, or keeps it alone. Of its buffer each batch finds what the first did."""

    last, follows = torch.zeros(()), True
    batches: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        y = super().forward(x.flatten(1)) * (self.batches + self.last * self.follows)
        self.last = y.mean().detach()
        return y


def test_what_a_batch_of_an_evaluation_leaves_to_the_next_is_said_where_that_follows_it(capsys: Any) -> None:
    pair = torch.randn(12, 1, 2, 2), torch.arange(12) % CLASSES
    _, val = loaders((pair, pair), World.single(), batch_size=4, workers=0)
    for follows in (False, True, True):
        model = Carries(4, CLASSES)
        model.follows = follows
        assert [evaluate(model, val, World.single()).count for _ in range(2)] == [12, 12]
        (once,) = [line for line in capsys.readouterr().err.splitlines() if "metrics will differ" in line] or [""]
        assert ("left in last" in once) == follows
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    step.own_loop, step.check.report = False, lambda finding, first: said.append((finding.what, finding.place, first))
    said: list[tuple[str, str, bool]] = []
    evaluate(Carries(4, CLASSES), val, World.single())  # another one, as its moving average is
    assert (said, capsys.readouterr().err) == ([("evaluation", "last", True)], "")
    step.check.law = "strict"
    with pytest.raises(UserError, match="--law strict: metrics will differ"):
        evaluate(Carries(4, CLASSES), val, World.single())


def test_a_loss_that_takes_more_of_a_batch_than_comes_with_it_is_said() -> None:
    held = torch.zeros(12, dtype=torch.int64)  # of the whole batch
    (said,) = found(World.single(), Net, lambda y, labels: F.cross_entropy(y, held), sizes=(12,))
    assert "a part of a batch fails: ValueError: Expected input batch_size (3) to match" in said[-1]


def test_a_loop_of_ones_own_gets_a_warning() -> None:
    model = Spread()
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match=r"weights will differ with the number of .*layer \(Layer\)") as seen:
        step(batch_of(World.single(), 12, 0))
    assert [each.filename for each in seen if "weights will differ" in str(each.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(batch_of(World.single(), 12, 1))


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("number", [2, 3])
def test_parts_cover_the_batch_and_are_not_the_shares_of_so_many_processes(number: int, single: bool) -> None:
    for size, group in itertools.product(range(1, 70), (1, 4)):
        parts = cut(5, 5 + size, group, number, single)
        assert [row for part in parts for row in range(*part)] == [*range(5, 5 + size)]
        assert all(a < b for a, b in parts)
        assert all((b - a) % group == 0 for a, b in parts[:-1])
        assert len(parts) > 1 or size <= group
        shares = [shard_of(size, k, number) for k in range(number)]
        assert group > 1 or size < 4 or parts != [(5 + share.start, 5 + share.stop) for share in shares]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_are_those_of_float64(scale: float) -> None:
    x = torch.randn(9_001) * scale
    assert norms_of([x, None]).tolist() == pytest.approx([float(x.double().norm()), 0], rel=1e-6)


@pytest.mark.parametrize(("turned", "found"), [(1e-2, []), (1e-6, ["1.weight"])])
def test_units_that_rounding_turns_off_may_be_in_any_layer(turned: float, found: list[str]) -> None:
    """Moved inputs turn off a unit of the first layer, another order of sums one of the second: that is rounding."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))

    def outcome(first: float, second: float) -> Outcome:
        gradients: list[Tensor | None] = [torch.full((4, 4), 1.0 + each) for each in (first, second)]
        return Outcome(gradients, torch.ones(2, dtype=torch.float64), HiddenState({}, []))

    batch = replace(batch_of(World.single(), 4, 0), images=torch.randn(4, 4), labels=torch.arange(4))
    step.check.start = step.check.state()
    moves = [lambda seed: step.check.apart(outcome(0, 0), outcome(0 if seed is None else turned, 0))] * 3
    compared = step.check.compared(batch, outcome(0, 1e-2), outcome(0, 0), moves)
    assert [each.place for each in compared] == found
