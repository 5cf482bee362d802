"""What makes a step another one on another number of processes is said, with its place and cause; nothing else is."""

import gc
import io
import itertools
import math
import warnings
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.distributed.failures import is_peer_gone
from lockstep.distributed.world import World, shard_of
from lockstep.errors import UserError
from lockstep.parallel.strategy import parallelize
from lockstep.training.batch_rows import cut
from lockstep.training.step import TrainStep
from tests.hostile.runs import neutral
from tests.ranks import run_ranks
from tests.training.checked_models import CASES, SIZES, Odd, Spread, Synced, found
from tests.training.test_equal_steps import HIDDEN, MODELS, Contrast, Net, batch_of, contrastive

pytestmark = pytest.mark.filterwarnings(r"ignore:(std|var)\(\). degrees of freedom", "ignore:.torch.jit.script. is dep")


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


@pytest.mark.slow
def test_a_fault_of_the_steps_own_is_said_too() -> None:
    for said in run_ranks(divided, 2, law=True):
        assert said[0][0] == "gradient"


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


def test_strict_raises_and_off_looks_at_nothing() -> None:
    with pytest.raises(UserError, match=r"weights will differ with the number of processes: at step 1 the gradient of"):
        found(World.single(), Spread, law="strict")
    assert found(World.single(), Spread, law="off") == []


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
