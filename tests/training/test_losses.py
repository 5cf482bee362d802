"""Losses whose denominator the whole batch decides, on any number of ranks and shards, against a loop by hand."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import OptimConfig
from lockstep.data.loaders import Batch
from lockstep.data.order import micro_batches, slices
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.exact import ExactSync
from lockstep.parallel.fsdp import whole
from lockstep.parallel.strategy import parallelize
from lockstep.training.assemble import loaders
from lockstep.training.losses import cross_entropy, loss_of, require_mean, terms_of
from lockstep.training.step import TrainStep
from tests.ranks import alone, run_ranks

SINGLE = World.single()
FEATURES, CLASSES = 4, 3
COUNTS = (7, 5, 2)  # of the batches: the last has fewer samples than three ranks
WEIGHTS = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
POSITIVE = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)

Loss = Callable[..., Any]


def labels_of(count: int) -> Tensor:
    return torch.tensor([0, 2, 1, 2, 0, 1, 2])[:count]


def several(labels: Tensor) -> Tensor:
    """Several labels for each sample: float64 [b, CLASSES]."""
    return torch.stack([(labels != c).double() for c in range(CLASSES)], dim=1)


def own_pair(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the samples of the classes 0 and 1 alone."""
    counts = labels < 2
    return (F.cross_entropy(outputs, labels, reduction="none") * counts).sum(), counts.sum()


def own_whole(outputs: Tensor, labels: Tensor) -> Tensor:
    numerator, denominator = own_pair(outputs, labels)
    return numerator / denominator


LOSSES: dict[str, Loss] = {
    "weights": nn.CrossEntropyLoss(WEIGHTS),
    "weights, smoothing, ignored": nn.CrossEntropyLoss(WEIGHTS, ignore_index=1, label_smoothing=0.1),
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
    "a partial": partial(F.cross_entropy, weight=WEIGHTS),
    "NLLLoss": nn.NLLLoss(WEIGHTS),
    "MultiMarginLoss": nn.MultiMarginLoss(weight=WEIGHTS),
    "BCE": lambda o, y: nn.BCEWithLogitsLoss(pos_weight=POSITIVE)(o, several(y)),
    "MSE by sample": lambda o, y: F.mse_loss(o, several(y), reduction="none"),
    "a pair": own_pair,
    "a plain function": F.cross_entropy,
}
# what a loop by hand calls on whole batches, where it is another one: (outputs, labels) -> scalar
OF_WHOLE_BATCHES: dict[str, Loss] = {"MSE by sample": lambda o, y: F.mse_loss(o, several(y)), "a pair": own_whole}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    count = COUNTS[step]
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, FEATURES, generator=generator, dtype=torch.float64), labels_of(count)


def part_of(world: World, t: int, accumulate: int = 1, exact: int = 0) -> Batch:
    images, labels = whole_batch(t)
    shards = slices(len(images), exact, world) if exact else micro_batches(len(images), accumulate, world)
    rows = np.concatenate([np.arange(0), *(np.arange(len(images))[shard.rows] for shard in shards)])
    return Batch(images[rows], labels[rows], shards, np.arange(len(images)), 0, t, 7 * t)


def trained(world: World, loss: Any, strategy: str = "ddp", accumulate: int = 1, exact: int = 0) -> dict[str, Any]:
    model = net()
    sync = ExactSync(model, world, exact) if exact else None
    wrapped = model if exact else parallelize(model, world, strategy=strategy)
    step = TrainStep(wrapped, loss, torch.optim.SGD(model.parameters(), 0.3, momentum=0.9), sync=sync)
    losses = []
    for t in range(len(COUNTS)):
        losses.append(step(part_of(world, t, accumulate, exact)).item())
    flat = torch.cat([whole(p).detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": flat.numpy().copy()}


@cache
def by_hand(name: str) -> dict[str, Any]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    for t in range(len(COUNTS)):
        images, labels = whole_batch(t)
        loss = OF_WHOLE_BATCHES.get(name, LOSSES[name])(model(images), labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()}


def everything(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name, loss in LOSSES.items():
        for accumulate in (1, 3):
            found["ddp", name, accumulate] = trained(world, loss, accumulate=accumulate)
        if world.size == 2:
            found["fsdp", name, 2] = trained(world, loss, "fsdp", 2)
        found["exact", name, 4] = trained(world, loss, exact=4)
    return found


@cache
def ranks_of(n: int) -> list[dict[Any, Any]]:
    return [alone(everything)] if n == 1 else run_ranks(everything, n, timeout=120, law=n == 2)


@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_loss_is_that_of_the_whole_batch(n: int) -> None:
    cases = set()
    for rank in ranks_of(n):
        for case, found in rank.items():
            cases.add(case[0])
            expected = by_hand(case[1])
            for what in ("losses", "weights"):
                np.testing.assert_allclose(found[what], expected[what], rtol=0, atol=1e-12, err_msg=str((case, what)))
    assert len(cases) == (3 if n == 2 else 2)


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_exact_mode_gives_the_same_bits_with_denominators(n: int) -> None:
    digests = {name: {ranks_of(k)[0]["exact", name, 4]["weights"].tobytes() for k in (1, n)} for name in LOSSES}
    assert all(len(each) == 1 for each in digests.values()), digests


def test_a_loss_that_is_no_mean_is_refused_on_any_number_of_processes() -> None:
    def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, WEIGHTS)

    wrong: list[Loss] = [weighted, own_whole, lambda o, y: F.cross_entropy(o, y, reduction="sum"), lambda o, y: o.std()]
    for loss in wrong:
        for accumulate in (1, 2):
            with pytest.raises(UserError, match=r"the loss is not the mean over its samples[\s\S]*whole_batch=True"):
                trained(SINGLE, loss, accumulate=accumulate)
    outputs, labels = net()(whole_batch(0)[0]), labels_of(7)
    for right in LOSSES.values():
        require_mean(terms_of(right), outputs, labels)
    require_mean(terms_of(lambda o, y: F.cross_entropy(F.dropout(o), y)), outputs, labels)  # at random: on trust
    calls = itertools.count()
    require_mean(terms_of(lambda o, y: F.cross_entropy(o, y) * (1 + (next(calls) > 1))), outputs, labels)
    faint = torch.zeros(len(labels)).index_fill(0, torch.tensor(0), 1e-45)  # float32 has no digits for its mean
    require_mean(terms_of(lambda o, y: o.mean()), faint, labels)
    pair = {"logits": outputs, "features": [outputs]}
    require_mean(terms_of(lambda o, y: F.cross_entropy(o["logits"], y)), pair, labels)
    named = {"logits": outputs, "centres": torch.randn(7, 3)}  # as many as samples, by chance
    labels[0] = 6
    require_mean(terms_of(lambda o, y: ((o["logits"][:, :3] - o["centres"][y]) ** 2).mean()), named, labels)
    with pytest.raises(UserError, match="not the mean"):
        require_mean(terms_of(lambda o, y: (o["features"][0] @ o["features"][0].T).logsumexp(1).mean()), pair, labels)


def test_what_can_not_be_a_loss_is_named() -> None:
    with pytest.raises(UserError, match=r'MSELoss\(reduction="sum"\) grows with the batch'):
        terms_of(nn.MSELoss(reduction="sum"))
    with pytest.raises(UserError, match="the loss is a str, not a function"):
        TrainStep(net(), "CrossEntropyLoss", torch.optim.SGD(net().parameters()))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the loss returned a float"):
        trained(SINGLE, lambda o, y: 0.5)
    with pytest.raises(UserError, match="the model returned a list of 2, and the loss takes one tensor"):
        cross_entropy(0.0)([torch.zeros(1, 2), torch.zeros(1, 2)], torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("optim", [OptimConfig(), OptimConfig(loss="focal")])
def test_more_outputs_than_classes_are_refused_at_the_first_step(optim: OptimConfig) -> None:
    train, _ = loaders("digits", SINGLE, batch_size=4)
    loss, _ = loss_of(optim, train)
    loss(torch.zeros(4, 10), torch.arange(4))
    with pytest.raises(UserError, match="the model has 11 outputs, and the training set 10 classes"):
        loss(torch.zeros(4, 11), torch.arange(4))


def test_what_no_step_can_be_taken_with_is_named() -> None:
    model = net()
    with pytest.raises(UserError, match="LBFGS evaluates the loss several times in a step"):
        TrainStep(model, F.cross_entropy, torch.optim.LBFGS(model.parameters()))
    twice = type("Twice", (torch.optim.SGD,), {"step": lambda self, closure: closure()})
    with pytest.raises(UserError, match="Twice evaluates the loss several times in a step"):
        TrainStep(model, F.cross_entropy, twice(model.parameters(), 0.1))
    sam = type("SAM", (torch.optim.SGD,), {"step": mock.Mock(side_effect=AssertionError("SAM requires closure"))})
    with pytest.raises(UserError, match="SAM evaluates the loss several times in a step"):
        TrainStep(model, F.cross_entropy, sam(model.parameters(), 0.1))(part_of(SINGLE, 0, 1, 0))
    with torch.no_grad(), pytest.raises(UserError, match=r"no loss has a gradient under torch\.no_grad\(\)"):
        TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1))(part_of(SINGLE, 0, 1, 0))
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UserError, match=r"parameters without a shape yet: 0\.weight, 0\.bias"):
        TrainStep(lazy, F.cross_entropy, torch.optim.SGD(lazy.parameters(), 0.1))
    frozen = net().requires_grad_(False)
    with pytest.raises(UserError, match="Sequential has no parameter to train"):
        TrainStep(frozen, F.cross_entropy, torch.optim.SGD(frozen.parameters(), 0.1))
    with pytest.raises(UserError, match="Sequential has no parameter to train"):  # DDP refuses it in other words
        parallelize(frozen, SINGLE)


class Noisy(torch.optim.SGD):
    """Langevin dynamics: noise in each update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def noisy(world: World) -> dict[str, Any]:
    model = net()
    torch.manual_seed(world.rank)
    step = TrainStep(parallelize(model, world), F.cross_entropy, Noisy(model.parameters(), 0.3))
    for t in range(len(COUNTS)):
        step(part_of(world, t))
    return {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()}


def test_an_optimizer_that_draws_noise_draws_the_same_on_every_rank() -> None:
    first, second = run_ranks(noisy, 2)
    assert np.array_equal(first["weights"], second["weights"])
    np.testing.assert_allclose(first["weights"], noisy(SINGLE)["weights"], rtol=0, atol=1e-12)


def _discard(_: torch.Tensor) -> None:
    """Nothing, which a hook has to return."""


@pytest.mark.parametrize("place", ["register_step_pre_hook", "register_step_post_hook", "step"])
def test_what_hangs_on_an_optimizer_draws_the_same_whatever_forward_has_drawn(place: str) -> None:
    drawn = []
    for amount in (0, 5):
        model = nn.Linear(FEATURES, CLASSES)
        model.register_forward_pre_hook(lambda *_, amount=amount: _discard(torch.empty(amount).random_()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if place == "step":
            optimizer.step = lambda: drawn.append(float(torch.rand(1)))  # type: ignore[method-assign, assignment, misc]
        else:
            getattr(optimizer, place)(lambda *_: drawn.append(float(torch.rand(1))))
        TrainStep(model.double(), F.cross_entropy, optimizer)(part_of(SINGLE, 0))
    assert drawn[0] == drawn[1]


def overflowing(world: World, skip: bool) -> dict[str, Any]:
    """fp16 whose scale is too large at first for single samples' gradients, not for sums over them."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    spread, optimizer = parallelize(model, world), torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(spread, F.cross_entropy, optimizer, precision="fp16", skip_nonfinite=skip)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    scales, left_out = [], []
    for t in range(8):
        images = torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(t)) * 0.01
        shards = micro_batches(6, 1, world)
        rows = shards[0].rows
        step(Batch(images[rows], labels_of(6)[rows], shards, np.arange(6), 0, t, 6 * t))
        scales.append(step.scaler.get_scale())
        left_out.append(step.left_out)
    return {"scales": scales, "left out": left_out, "skipped": step.skipped, "weights": model.weight.detach().numpy()}


def both(world: World) -> list[dict[str, Any]]:
    return [overflowing(world, False), overflowing(world, True)]


def test_fp16_leaves_out_the_same_steps_on_any_number_of_ranks_and_lowers_its_scale() -> None:
    one = both(SINGLE)
    assert 0 < one[0]["skipped"] < 8
    assert one[0]["scales"][-1] < 2.0**22
    assert sum(one[1]["left out"]) == one[1]["skipped"] == one[0]["skipped"]
    for rank in run_ranks(both, 3):
        for found, expected in zip(rank, one, strict=True):
            assert found["scales"] == expected["scales"], "what is left out depends on the number of ranks"
            assert (found["skipped"], found["left out"]) == (expected["skipped"], expected["left out"])
            np.testing.assert_allclose(found["weights"], expected["weights"], atol=1e-3)
