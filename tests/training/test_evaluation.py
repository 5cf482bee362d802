"""Evaluation counts every sample once, on any number of ranks, and gives the same bits on all of them."""

import random
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.checkpoint.weights import digest
from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import EvalLoader, reader
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.strategy import parallelize
from lockstep.training.evaluation import Metrics, _sums, averaged, evaluate
from tests.ranks import alone, run_ranks

SINGLE = World.single()
CASES = [(1, 4), (2, 4), (3, 1), (10, 3), (37, 5), (37, 100)]  # (samples, samples per forward pass)
CLASSES = 12


def images(samples: int, classes: int = CLASSES) -> ArraySet:
    generator = np.random.default_rng(samples)
    pixels = generator.integers(0, 256, (samples, 1, 5, 5), dtype=np.uint8)
    labels = generator.integers(0, classes, samples)
    return ArraySet("random", tuple(map(str, range(classes))), (0.5,), (0.3,), (pixels,), labels, "random")


def loader(data: ArraySet, world: World, size: int, kind: str = "resident") -> EvalLoader:
    return EvalLoader(data, Augment((0.5,), (0.3,)), world, reader(data, world.device, kind), size)


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(4)
    layer = nn.BatchNorm2d(6) if norm else nn.Identity()
    return nn.Sequential(nn.Conv2d(1, 6, 3), layer, nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(54, CLASSES))


def everything(world: World) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for samples, size in CASES:
        data = images(samples)
        model = parallelize(network(), world)
        for kind in ("resident", "streaming"):
            found[samples, size, kind] = evaluate(model, loader(data, world, size, kind), world).to_dict()
        found[samples, size, "bf16"] = evaluate(model, loader(data, world, size), world, "bf16").to_dict()
    # running statistics that each rank moved by its own share: no longer one model
    model = parallelize(network(), world, batch_norm="local")
    model.train()
    for step in range(3):
        model(torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(10 * step + world.rank)) + world.rank)
    norm = model.module[1] if world.size > 1 else model[1]
    before, digests = norm.running_mean.tolist(), [digest(model)]
    metrics = [evaluate(model, loader(images(10), world, 3), world).to_dict()]
    digests.append(digest(model))
    average_buffers(model, world.size)
    digests.append(digest(model))
    metrics.append(evaluate(model, loader(images(10), world, 3), world, synchronized=True).to_dict())
    found["buffers"] = {
        "before": before,
        "after": norm.running_mean.tolist(),
        "digests": digests,
        "metrics": metrics,
        "training": [m.training for m in model.modules()],
    }
    return found


class MonteCarlo(nn.Module):
    """Goes on in evaluation as in training: draws of every kind, statistics of its batch, a count in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout())
        self.head = nn.Linear(54, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def train(self, mode: bool = True) -> "MonteCarlo":
        del mode
        return super().train(True)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() + np.random.rand() + torch.empty(1).cauchy_().clamp(-1, 1)
        return self.head(self.features(x) * noise) * self.calls


def monte_carlo(world: World) -> list[Any]:
    model, data = MonteCarlo(), images(37)
    wrapped = parallelize(model, world)
    torch.manual_seed(world.rank), random.seed(world.rank)
    before = random.getstate()
    found = [evaluate(wrapped, loader(data, world, 5), world).to_dict() for _ in range(2)]
    assert random.getstate() == before
    return [*found, float(model.calls), model.features[1].running_mean.tolist()]


def test_a_model_that_draws_and_counts_in_evaluation_has_the_same_metrics_on_any_number_of_ranks() -> None:
    alone = monte_carlo(SINGLE)
    assert alone[0] == alone[1]
    assert alone[2] == 0
    assert run_ranks(monte_carlo, 2) == [alone] * 2


class Replayed(nn.Module):
    """Gives its outputs in memory that the next call writes to, as a CUDA graph does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.memory = inner, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.inner(x)
        self.memory = outputs if len(self.memory) == 0 else self.memory.copy_(outputs)
        return self.memory


@pytest.mark.parametrize("tta", ["mirror", "shift"])
def test_views_are_averaged_though_a_graph_replays_into_one_memory(tta: str) -> None:
    model, x = network().eval(), torch.randn(3, 1, 5, 5)
    with torch.no_grad():
        assert torch.equal(averaged(Replayed(model), x, tta), averaged(model, x, tta))


@cache
def ranks_of(n: int) -> list[dict[Any, Any]]:
    return [alone(everything)] if n == 1 else run_ranks(everything, n)


@pytest.mark.parametrize("n", [2, 3])
def test_metrics_are_the_same_bits_on_any_number_of_ranks_and_count_each_sample_once(n: int) -> None:
    alone = ranks_of(1)[0]
    for samples, size in CASES:
        for kind in ("resident", "streaming", "bf16"):
            for rank in ranks_of(n):
                assert rank[samples, size, kind] == alone[samples, size, kind]
                assert rank[samples, size, kind]["count"] == samples


@pytest.mark.parametrize(("samples", "size"), CASES)
def test_metrics_are_those_of_the_whole_set_at_once(samples: int, size: int) -> None:
    data, model = images(samples), network().eval()
    pixels, labels = data.load_all()
    with torch.no_grad():
        outputs = model(Augment((0.5,), (0.3,))(pixels, torch.arange(samples), None))
    found = ranks_of(3)[0][samples, size, "resident"]
    for k in (1, 5):
        hits = (outputs.topk(k).indices == labels[:, None]).any(1).double().mean().item()
        assert found[f"top{k}"] == pytest.approx(hits, abs=1e-12)
    assert found["loss"] == pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-5)


@pytest.mark.parametrize("n", [2, 3])
def test_buffers_that_ranks_moved_apart_are_averaged_by_the_evaluation(n: int) -> None:
    found = [rank["buffers"] for rank in ranks_of(n)]
    assert len({str(rank["before"]) for rank in found}) == n, "the ranks must have differed, or this proves nothing"
    assert len({rank["digests"][0] for rank in found}) == n
    assert len({digest for rank in found for digest in rank["digests"][1:]}) == 1, "rank 0 saves what all evaluate"
    assert len({str(metrics) for rank in found for metrics in rank["metrics"]}) == 1
    mean = np.mean([rank["before"] for rank in found], axis=0)
    for rank in found:
        np.testing.assert_allclose(rank["after"], mean, rtol=0, atol=1e-6)
        assert all(rank["training"])


# One process


def sums(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """What a batch adds to each metric, by name."""
    names = [field.name for field in fields(Metrics) if field.name != "map"]  # which is no sum
    return dict(zip(names, _sums(outputs, labels).tolist(), strict=True))


def slow_sums(outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Sample by sample, without the loss; a tie is lost, and so is nan. A metric `topK` is counted for every K."""
    hits = {field.name: 0 for field in fields(Metrics) if field.name.startswith("top")}
    for row, label in zip(outputs.tolist(), labels.tolist(), strict=True):
        others = [score for k, score in enumerate(row) if k != label]
        wins = sum(row[label] > other for other in others)
        for name in hits:
            hits[name] += len(others) - wins < int(name.removeprefix("top"))
    assert {"top1", "top5"} <= set(hits)
    return {**hits, "count": len(labels)}


@given(
    rows=st.lists(
        st.tuples(st.lists(st.sampled_from([-1.0, 0.0, 2.0, 7.5]), min_size=7, max_size=7), st.integers(0, 6)),
        min_size=1,
        max_size=6,
    ),
    classes=st.integers(2, 7),
)
@settings(deadline=None)
def test_sums_against_counting_by_hand(rows: list[tuple[list[float], int]], classes: int) -> None:
    outputs = torch.tensor([row[:classes] for row, _ in rows])
    labels = torch.tensor([label % classes for _, label in rows])
    found = sums(outputs, labels)
    loss = found.pop("loss")
    assert found == slow_sums(outputs, labels)
    assert loss == pytest.approx(F.cross_entropy(outputs, labels, reduction="sum").item(), rel=1e-5)


def test_ties_and_broken_outputs_score_nothing() -> None:
    labels = torch.arange(8)
    for value in (0.0, float("nan"), float("inf")):
        found = sums(torch.full((8, 8), value), labels)
        assert (found["top1"], found["top5"], found["count"]) == (0, 0, 8), value
    one_broken = torch.eye(8)
    one_broken[3] = float("nan")
    assert (sums(one_broken, labels)["top1"], sums(one_broken, labels)["top5"]) == (7, 7)


def test_a_label_beyond_the_outputs_is_told() -> None:
    with pytest.raises(UserError, match="the evaluation set has the label 4, and the model 4 outputs"):
        sums(torch.randn(5, 4), torch.arange(5))


@pytest.mark.parametrize("classes", [2, 4, 5])
def test_with_five_classes_or_fewer_the_top_five_hold_the_answer(classes: int) -> None:
    found = sums(torch.randn(9, classes), torch.arange(9) % classes)
    assert found["top5"] == found["count"] == 9
    assert found["top1"] < 9


def test_evaluation_is_deterministic_whatever_it_finds_and_leaves_as_it_was() -> None:
    model, data = network(), images(20)
    model[1].eval()  # frozen by the user
    model[0].weight.requires_grad_(False)
    modes, before = [m.training for m in model.modules()], digest(model)
    first = evaluate(model, loader(data, SINGLE, 6), SINGLE)
    assert evaluate(model, loader(data, SINGLE, 6), SINGLE) == first, "dropout must be off"
    assert [m.training for m in model.modules()] == modes
    assert digest(model) == before

    def fails(*_: Any) -> Tensor:
        raise RuntimeError("broken")

    model[5].forward = fails
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(model, loader(data, SINGLE, 6), SINGLE)
    assert [m.training for m in model.modules()] == modes


def test_float64_outputs_keep_their_bits() -> None:
    model = network().double()
    model.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    pixels, labels = images(9).load_all()
    with torch.no_grad():
        model.eval()
        outputs = model(Augment((0.5,), (0.3,))(pixels, torch.arange(9), None))
    assert evaluate(model, loader(images(9), SINGLE, 9), SINGLE).loss == pytest.approx(
        F.cross_entropy(outputs, labels).item(), abs=1e-13
    )


@pytest.mark.parametrize("tta", ["mirror", "shift"])
def test_the_mean_over_views_is_the_same_for_the_mirror_image(tta: str) -> None:
    model = network().eval()
    pixels = torch.randn(7, 1, 5, 5)
    with torch.no_grad():
        plain, found = (averaged(model, pixels, kind) for kind in ("none", tta))
        assert torch.equal(plain, model(pixels))
        assert not torch.allclose(found, plain)
        if tta == "mirror":
            torch.testing.assert_close(found, averaged(model, pixels.flip(3), tta))
        flat = torch.ones(7, 1, 5, 5)  # looks the same from everywhere
        torch.testing.assert_close(averaged(model, flat, tta), model(flat))
    data = images(9)
    one, other = (evaluate(model, loader(data, SINGLE, size), SINGLE, tta=tta) for size in (4, 9))
    assert (one.top1, one.count) == (other.top1, 9)
    assert evaluate(model, loader(data, SINGLE, 4), SINGLE).loss != one.loss
