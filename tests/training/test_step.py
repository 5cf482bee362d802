"""One step: dropout's keys, the weight of each shard, fp16's decision, clipping, the schedule, unused parameters."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config import OptimConfig
from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import Batch, TrainLoader, reader
from lockstep.data.order import Order, micro_batches
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel.strategy import parallelize
from lockstep.training import optimizers
from lockstep.training.evaluation import evaluate
from lockstep.training.losses import ClassLoss
from lockstep.training.step import TrainStep
from tests.ranks import RankFailed, alone, run_ranks

SINGLE = World.single()
FEATURES, CLASSES = 4, 3


def test_a_gradient_that_another_optimizer_waits_for_is_kept() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
    step = TrainStep(model, F.cross_entropy, torch.optim.SGD(model[1].parameters(), 0.1))
    model[0](torch.ones(2, FEATURES)).sum().backward()
    before = {name: p.grad.clone() for name, p in model[0].named_parameters() if p.grad is not None}
    assert len(before) == 2
    for t in range(3):
        step(batch_of(SINGLE, torch.randn(6, FEATURES), step=t))
    for name, p in model[0].named_parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, before[name])
    assert model[1].weight.grad is None


def pretend(rank: int, size: int) -> World:
    """One of several ranks, without the others: for what a rank does on its own."""
    return World(rank, size, rank, size, torch.device("cpu"), "none")


def batch_of(world: World, images: Tensor, labels: Tensor | None = None, accumulate: int = 1, step: int = 0) -> Batch:
    """This rank's part of a global batch given whole."""
    labels = torch.arange(len(images)) % CLASSES if labels is None else labels
    shards = micro_batches(len(images), accumulate, world)
    rows = np.concatenate([np.arange(len(images))[shard.rows] for shard in shards])
    return Batch(images[rows], labels[rows], shards, np.arange(len(images)), 0, step, step * len(images))


def inputs(n: int, scale: float = 1.0) -> Tensor:
    return torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(n)) * scale


def linear(world: World, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return parallelize(nn.Linear(FEATURES, CLASSES).to(dtype), world)


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr)


def weights(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


# Dropout


class Masks(nn.Module):
    """Notes dropout's draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES))
        self.dropout = nn.Dropout()
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = self.dropout(torch.ones(len(x), 40))
        self.seen.append((mask > 0).flatten().tolist())
        return x[:, :CLASSES] * self.weight


def masks(
    world: World, seed: int = 0, steps: int = 2, accumulate: int = 1, stir: Callable[[], Any] = lambda: None
) -> list[list[bool]]:
    model = Masks()
    wrapped = model if world.backend == "none" else parallelize(model, world)
    step = TrainStep(wrapped, F.cross_entropy, sgd(model), seed=seed)
    for t in range(steps):
        stir()
        step(batch_of(world, inputs(8), accumulate=accumulate, step=t))
    return model.seen


def by_sample(seen: list[list[bool]], sizes: list[int]) -> list[list[bool]]:
    """The masks of the samples in the global batch's order, from those of its shards."""
    return [row for mask, size in zip(seen, sizes, strict=True) for row in np.reshape(mask, (-1, 40))[:size].tolist()]


def test_dropout_is_a_function_of_seed_step_and_sample() -> None:
    whole, later = masks(SINGLE)
    assert [whole, later] == masks(SINGLE)
    assert whole != later, "another step, other draws"
    assert whole != masks(SINGLE, seed=1)[0]
    assert later != masks(SINGLE, seed=1, steps=1)[0], "seed and step are not added up"
    samples = by_sample([whole], [8])
    assert len(set(map(tuple, samples))) == 8, "another sample, other draws"
    assert 0.35 < np.mean(samples) < 0.65
    for n, accumulate, sizes in ((2, 1, [4, 4]), (3, 1, [3, 3, 2]), (1, 2, [4, 4]), (1, 4, [2, 2, 2, 2])):
        shards = [mask for rank in range(n) for mask in masks(pretend(rank, n), steps=1, accumulate=accumulate)]
        assert by_sample(shards, sizes) == samples, (n, accumulate)


def test_dropout_is_not_disturbed_by_other_draws_from_torchs_generator() -> None:
    assert masks(pretend(1, 2), stir=lambda: torch.rand(7)) == masks(pretend(1, 2))
    assert masks(pretend(1, 2), stir=lambda: torch.manual_seed(5)) == masks(pretend(1, 2))


# Processes: what follows runs once on each number of ranks


def uneven(world: World) -> dict[tuple[int, int], Any]:
    """Batches that N does not divide, down to one sample, against the whole batch in one process."""
    found = {}
    for n in (1, 2, 5, 7):
        for accumulate in (1, 2):
            model = linear(world)
            mean = TrainStep(model, F.cross_entropy, sgd(model))(
                batch_of(world, inputs(n).double(), accumulate=accumulate)
            )
            found[n, accumulate] = weights(model), mean.item(), mean.dtype
    return found


def overflow(world: World) -> list[tuple[np.ndarray, float]]:
    """fp16, where one rank's share overflows in one step of three."""
    model = linear(world, torch.float32)
    step = TrainStep(model, F.cross_entropy, sgd(model, 0.1), precision="fp16", clip_norm=10.0)
    step.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    history = [(weights(model), step.scaler.get_scale())]
    for t in range(3):
        images = inputs(4)
        if t == 1:
            images[-1] = 6e4  # the last rank's; float16 ends at 65504
        step(batch_of(world, images, step=t))
        history.append((weights(model), step.scaler.get_scale()))
    return history


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.forgotten = nn.Linear(FEATURES, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused(world: World) -> str:
    """What is said of parameters that the loss does not use; where that is accepted, or they are frozen, nothing is."""
    model = Unused()
    accepting = parallelize(model, world, find_unused_parameters=True)
    step = TrainStep(accepting, F.cross_entropy, sgd(model))
    for t in range(3):
        step(batch_of(world, inputs(4), step=t))
    model = Unused()
    model.forgotten.requires_grad_(False)  # frozen is not forgotten
    step = TrainStep(parallelize(model, world), F.cross_entropy, sgd(model))
    for t in range(2):
        step(batch_of(world, inputs(4), step=t))
    model = Unused()
    step = TrainStep(parallelize(model, world), F.cross_entropy, sgd(model))
    with pytest.raises(UserError) as refused:
        step(batch_of(world, inputs(4)))
    return str(refused.value)


def unfrozen(world: World) -> list[np.ndarray]:
    """Weights where a layer is trained from the second step on, in a group that comes then or was there."""
    found = []
    for late in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES)).double()
        model[0].requires_grad_(False)
        first, optimizer = {"params": [*model[0].parameters()], "lr": 0.25}, torch.optim.SGD(model[2].parameters(), 0.5)
        loss = nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 4.0]).double())
        wrapped = parallelize(model, world)
        if not late:
            optimizer.add_param_group(first)
        step = TrainStep(wrapped, loss, optimizer, clip_norm=0.1, schedule=lambda samples: 1.0)
        for t, n in enumerate((7, 5, 2, 7)):
            if t == 1:
                model[0].requires_grad_(True)
                if late:
                    optimizer.add_param_group(first)
            step(batch_of(world, inputs(n).double(), step=t))
        found.append(weights(model))
    return found


def replaced_layers(world: World) -> list[np.ndarray]:
    """Weights after each step where layers come, some in another's place: before a step is made, and between steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES + 1)).double()
    wrapped = parallelize(model, world)
    torch.manual_seed(world.rank)  # what comes later begins with rank 0's values
    model[2] = nn.Linear(FEATURES, CLASSES).double()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.5)
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    step, found = TrainStep(wrapped, F.cross_entropy, optimizer), []
    for t, n in enumerate((7, 5, 2, 7)):
        if t == 1:
            model[2] = nn.Linear(FEATURES, CLASSES).double()
            optimizer.param_groups.pop()
            optimizer.add_param_group({"params": [*model[2].parameters()]})
        if t == 2:
            model.append(nn.Linear(CLASSES, CLASSES).double())
            optimizer.add_param_group({"params": [*model[3].parameters()]})
        if t == 3:
            model[3] = nn.Linear(CLASSES, CLASSES).double()
            optimizer.param_groups[-1]["params"][:] = model[3].parameters()
        step(batch_of(world, inputs(n).double(), step=t))
        found.append(weights(model))
    return found


class Centres(nn.Module):
    """Center loss: the centres of the classes are parameters."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(CLASSES, CLASSES, dtype=torch.float64), trained)

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels) + (outputs - self.centres[labels]).pow(2).sum(1).mean()


def centred(world: World) -> list[str]:
    """What is said of a loss that has parameters; nothing of frozen ones, nor of the model's own."""
    said, (free, apart) = [], [torch.zeros(CLASSES, dtype=torch.float64, requires_grad=each) for each in (True, False)]
    model = linear(world)

    def penalised(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs + apart, labels) + 0 * sum(p.sum() for p in model.parameters())

    for loss in (
        Centres(),
        lambda outputs, labels: F.cross_entropy(outputs + free, labels),
        Centres(trained=False),
        penalised,
    ):
        model = linear(world)
        step = TrainStep(model, loss, sgd(model))
        try:
            step(batch_of(world, inputs(6).double()))
            said.append("")
        except UserError as refused:
            said.append(refused.message)
    return said


class Rated(nn.Module):
    """A loss over a moving average that it writes in place, and uses in the same pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs, labels)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.2)
        return loss / self.mean


def rated(world: World) -> list[np.ndarray]:
    found = []
    for law in ("off", "warn"):
        model, loss = linear(world), Rated()
        step = TrainStep(model, loss, sgd(model), law=law)
        for t in range(2):
            step(batch_of(world, inputs(6).double(), step=t))
        found.append(np.append(weights(model), loss.mean))
    return found


def everything(world: World) -> dict[str, Any]:
    return {
        "unfrozen": unfrozen(world),
        "replaced": replaced_layers(world),
        "rated": rated(world),
        "masks": masks(world),
        "uneven": uneven(world),
        "overflow": overflow(world),
        "unused": unused(world),  # these leave a DDP reducer in the middle of a step
        "centred": centred(world),
    }


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [alone(everything)] if request.param == 1 else run_ranks(everything, request.param)


def test_a_samples_mask_is_the_same_on_any_rank(ranks: list[dict[str, Any]]) -> None:
    sizes = [len(rank["masks"][0]) // 40 for rank in ranks]
    for step, whole in enumerate(masks(SINGLE)):
        assert by_sample([rank["masks"][step] for rank in ranks], sizes) == by_sample([whole], [8])


def test_layers_may_come_and_go(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for ours, expected in zip(rank["replaced"], replaced_layers(SINGLE), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-12)


def test_every_sample_weighs_the_same_in_uneven_and_empty_shares(ranks: list[dict[str, Any]]) -> None:
    for n in (1, 2, 5, 7):
        model = linear(SINGLE)
        expected_loss = F.cross_entropy(model(inputs(n).double()), torch.arange(n) % CLASSES)
        expected_loss.backward()
        sgd(model).step()
        for accumulate in (1, 2):
            for rank in ranks:
                found, loss, dtype = rank["uneven"][n, accumulate]
                np.testing.assert_allclose(found, weights(model), rtol=0, atol=1e-14)
                assert loss == pytest.approx(expected_loss.item(), abs=1e-12)
                assert dtype == torch.float64, "a rank with an empty share must add the same dtype as the others"


def test_all_ranks_skip_the_step_in_which_one_overflows(ranks: list[dict[str, Any]]) -> None:
    history = ranks[0]["overflow"]
    for rank in ranks:
        for (mine, scale), (expected, expected_scale) in zip(rank["overflow"], history, strict=True):
            assert np.array_equal(mine, expected)
            assert scale == expected_scale
    moved = [bool((a[0] != b[0]).any()) for a, b in pairwise(history)]
    assert moved == [True, False, True]
    assert [scale for _, scale in history] == [1024, 1024, 512, 512]


def test_parameters_that_come_in_a_new_group_are_trained_as_the_others(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        np.testing.assert_array_equal(*rank["unfrozen"])


def test_parameters_of_the_loss_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["centred"]
        assert "the loss.centres gets a gradient" in said[0]
        assert "free of centred.<locals>.<lambda> gets a gradient" in said[1]
        assert said[2:] == ["", ""]


def test_a_loss_may_use_what_it_writes_in_place(ranks: list[dict[str, Any]]) -> None:
    expected = rated(SINGLE)[0]
    for rank in ranks:
        for found in rank["rated"]:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_an_unused_parameter_is_named_in_the_first_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said, _, remedy = rank["unused"].partition("\n")
        assert said == "2 parameter(s) took no part in the loss: forgotten.weight, forgotten.bias"
        assert "give parallelize find_unused_parameters=True" in remedy


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"labels": torch.zeros(6)}, "the loss does not take labels float32 [6] on cpu for outputs float32 [6, 3] on cpu"),
    ({"labels": torch.tensor([0, 1, 2, -1, 0, 1])}, "sample 3 has label -1, and the model 3 outputs"),
    ({"labels": torch.tensor([0, 1, 2, 1, 3, 4])}, "sample 4 has label 3, and the model 3 outputs"),
    ({"labels": torch.zeros(6, 1, dtype=torch.int64)}, "the loss does not take labels int64 [6, 1] on cpu"),
    ({"labels": torch.zeros(5, dtype=torch.int64)}, "the batch holds 6 images and 5 labels, and came with 6 samples"),
    ({"images": inputs(5), "labels": torch.zeros(5, dtype=torch.int64)}, "the batch holds 5 images and 5 labels, and"),
    ({"labels": torch.zeros(6, dtype=torch.int64, device="meta")}, "the loss does not take labels int64 [6] on meta"),
    ({"images": inputs(6)[:, 1:]}, "0, Linear(in_features=4, out_features=3, bias=True) does not take images float32"),
    ({"images": inputs(6).byte()}, "does not take images uint8 [6, 4] on cpu"),
    ({"images": inputs(6).double()}, "does not take images float64 [6, 4] on cpu"),
]


@pytest.mark.parametrize(("bad", "says"), MISFITS, ids=[says for _, says in MISFITS])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(), lambda *pair: F.cross_entropy(*pair)])
def test_a_batch_that_does_not_fit_is_told_in_a_sentence(loss: Any, bad: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    step = TrainStep(model, loss, sgd(model))
    step(batch_of(SINGLE, inputs(6)))
    with pytest.raises(UserError) as refused:
        step(replace(batch_of(SINGLE, inputs(6), step=1), **bad))
    assert refused.value.message.startswith("step 2: ")
    assert says in refused.value.message
    assert refused.value.remedy


def test_a_layer_that_does_not_take_what_the_one_before_gives_is_told_without_the_images() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)).double()
    model[0].register_forward_hook(lambda module, args, outputs: outputs.float())
    with pytest.raises(UserError, match=r"step 1: 1, Linear\(.*\) does not take float32 \[4, 7\] on cpu: "):
        TrainStep(model, F.cross_entropy, sgd(model))(batch_of(SINGLE, inputs(4).double()))


@pytest.mark.parametrize("kind", ["focal", "bce", "cross-entropy"])
def test_a_label_beyond_the_outputs_is_told_with_each_loss(kind: str) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    step = TrainStep(model, ClassLoss(kind, weights=torch.ones(CLASSES, dtype=torch.float64)), sgd(model))
    with pytest.raises(UserError, match="step 1: sample 4 has label 3, and the model 3 outputs"):
        step(batch_of(SINGLE, inputs(6), torch.tensor([0, 1, 2, 1, 3, 0])))


@pytest.mark.parametrize(("label", "says"), [(-1, "no such image"), (7, "sample 3 has label 7, and the model 3")])
def test_a_rank_that_raises_is_named_and_nothing_hangs(label: int, says: str) -> None:
    with pytest.raises(RankFailed, match=rf"rank 1 of 2: [\s\S]*{says}"):
        run_ranks(_raise_on_rank_1, 2, label, timeout=30)


def _raise_on_rank_1(world: World, label: int) -> None:
    model = linear(world)
    step = TrainStep(model, F.cross_entropy, sgd(model))
    for t in range(3):
        if world.rank == 1 and t == 1 and label < 0:
            raise ValueError("no such image")
        labels = torch.tensor([0, 1, 2, label if t else 0])  # the last is rank 1's
        step(batch_of(world, inputs(4).double(), labels, step=t))


# One process


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    model = linear(SINGLE, torch.float32)
    before = weights(model)
    TrainStep(model, F.cross_entropy, sgd(model), precision="fp16", clip_norm=1e-2)(batch_of(SINGLE, inputs(8)))
    # clipped at the loss scale of 65536 it would move by so much less
    assert np.linalg.norm(weights(model) - before) == pytest.approx(1e-2, rel=1e-3)


def test_the_schedule_multiplies_each_groups_own_rate_by_samples_seen() -> None:
    model = linear(SINGLE)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}])
    step = TrainStep(model, F.cross_entropy, optimizer, schedule=lambda samples: 1 / (1 + samples))
    for t in range(3):
        step(batch_of(SINGLE, inputs(4).double(), step=t))
        assert [group["lr"] for group in optimizer.param_groups] == [1 / (1 + 4 * t), 0.1 * (1 / (1 + 4 * t))]


def test_bf16_keeps_float32_weights_and_a_float32_loss() -> None:
    model = linear(SINGLE, torch.float32)
    kinds = []
    model.register_forward_hook(lambda module, args, out: kinds.append(out.dtype))
    loss = TrainStep(model, F.cross_entropy, sgd(model), precision="bf16")(batch_of(SINGLE, inputs(4)))
    assert kinds == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert loss.dtype == torch.float32
    assert not loss.requires_grad


def test_a_user_keeps_a_plain_module_and_a_plain_optimizer() -> None:
    model = nn.Linear(FEATURES, CLASSES)
    assert parallelize(model, SINGLE) is model
    optimizer = sgd(model)
    step = TrainStep(model, F.cross_entropy, optimizer)
    step(batch_of(SINGLE, inputs(4)))
    assert type(optimizer) is torch.optim.SGD
    assert all(parameter.grad is None for parameter in model.parameters())


class _Replay(torch.autograd.Function):
    """x @ weight, whose gradient lies in memory that the next call writes to, as that of a CUDA graph does."""

    memory = np.zeros((FEATURES, CLASSES))

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        _Replay.memory[:] = (x.T @ grad).numpy()
        return None, torch.from_numpy(_Replay.memory)


class Replayed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, FEATURES * CLASSES).double().view(FEATURES, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        replayed: Tensor = _Replay.apply(x, self.weight)
        return replayed


def test_gradients_in_a_graph_s_memory_outlive_the_next_piece() -> None:
    ends = []
    for accumulate, replays in ((1, False), (2, True), (2, False)):
        model = Replayed()
        step = TrainStep(model, F.cross_entropy, sgd(model), law="off")
        step._replays = replays  # as where a compiled model is on a GPU
        step(batch_of(SINGLE, inputs(6).double(), accumulate=accumulate))
        ends.append(model.weight.detach().clone())
    torch.testing.assert_close(ends[1], ends[0])
    assert not torch.allclose(ends[2], ends[0]), "without the copy it goes wrong, so this can fail"


def small_set() -> ArraySet:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 1, 4, 4), dtype=np.uint8)
    return ArraySet("small", ("a", "b"), (0.5,), (0.2,), (pixels,), np.arange(24) % 2, "small")


def training_parts(world: World) -> tuple[TrainLoader, TrainStep]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(), nn.Linear(12, 2))
    model = parallelize(net.to(world.device), world, batch_norm="global")
    augment = Augment((0.5,), (0.2,), 0, crop_padding=1, flip=True, cutout=2)
    images = small_set()
    loader = TrainLoader(images, Order(24, 8, 0), augment, world, reader(images, world.device), accumulate=2)
    optimizer = optimizers.build(model, OptimConfig(lr=0.1), 0.1)
    step = TrainStep(
        model, F.cross_entropy, optimizer, precision="bf16", clip_norm=1.0, schedule=lambda samples: 0.5 + samples / 100
    )
    return loader, step


@pytest.mark.gpu
def test_no_step_waits_for_the_gpu() -> None:
    from lockstep.data.loaders import EvalLoader

    world = World.single("cuda")
    loader, step = training_parts(world)
    step.check.law = "off"
    batches = loader.epoch(0)
    step(next(batches))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    images = small_set()
    evaluation = EvalLoader(images, Augment((0.5,), (0.2,)), world, reader(images, world.device), 7)
    assert evaluate(step.model, evaluation, world).count == 24
