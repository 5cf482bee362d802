"""The first law, on real gloo processes: the number of ranks and the way data comes change nothing that is learned.

Each number of ranks is started once (`ranks_of`), computes everything below and hands it back; the tests compare it
with one plain loop over whole batches that knows of no ranks (`plain`), and with each other.
"""

import hashlib
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.config import OptimConfig
from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import TrainLoader, reader
from lockstep.data.order import EMPTY_LEDGER, Order, extend_ledger
from lockstep.distributed.world import World, shard_of
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.strategy import parallelize
from lockstep.training import optimizers, schedules
from lockstep.training.step import TrainStep
from tests.ranks import run_ranks

WORLDS = (1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow))
SAMPLES, BATCH, EPOCHS = 42, 10, 4  # 20 steps; each epoch's last batch has 2 samples, fewer than 3 ranks
SEED, CLASSES = 3, 5
EMA = 0.9
OPTIMIZERS = {
    "sgd": OptimConfig(
        optimizer="sgd", lr=0.2, momentum=0.9, nesterov=True, weight_decay=1e-2, clip_norm=1.5, schedule="one-cycle"
    ),
    "adamw": OptimConfig(
        optimizer="adamw", lr=0.02, weight_decay=0.1, decay_norms="yes", clip_norm=1.5, schedule="one-cycle"
    ),
}

# (batch size, fraction): what decides the order
ORDERS = [(10, 1.0), (7, 0.6), (3, 1.0)]
# (accumulate, loader, workers): what must not
WAYS = [(1, "resident", 0), (3, "resident", 0), (2, "streaming", 0), (1, "streaming", 1), (2, "streaming", 2)]


def numbered() -> ArraySet:
    """Images of which each is different; the label is the sample id, so that a batch says what was really read."""
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, 2, 6, 6), dtype=np.uint8)
    classes = tuple(map(str, range(SAMPLES)))
    return ArraySet("numbered", classes, (0.5, 0.4), (0.2, 0.3), (pixels,), np.arange(SAMPLES), "numbered")


def augment() -> Augment:
    return Augment((0.5, 0.4), (0.2, 0.3), SEED, crop_padding=2, flip=True, cutout=3)


class Net(nn.Module):
    """A small float64 net, smooth everywhere; with or without batch normalisation."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=not norm)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.head = nn.Linear(64, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.conv(x.double()))).flatten(1))


def net(norm: bool) -> Net:
    torch.manual_seed(1)
    return Net(norm)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels % CLASSES)


def state(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def schedule(optim: OptimConfig, samples: int) -> float:
    return schedules.factor(optim, samples, SAMPLES, EPOCHS)


@cache
def plain(name: str, norm: bool, accumulate: int) -> dict[str, Any]:
    """What any number of ranks must come to: whole batches, torch's modules, nothing of ours that knows of ranks."""
    optim, model, images, order = OPTIMIZERS[name], net(norm), numbered(), Order(SAMPLES, BATCH, SEED)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    extra = {"momentum": optim.momentum, "nesterov": True} if name == "sgd" else {}
    optimizer = kinds[name](model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay, **extra)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    losses, norms = [], []
    for epoch in range(EPOCHS):
        for t, ids in enumerate(order.steps(epoch)):
            optimizer.param_groups[0]["lr"] = optim.lr * schedule(optim, epoch * SAMPLES + t * BATCH)
            pixels, labels = images.read(ids)
            inputs = augment()(pixels, torch.from_numpy(ids), epoch)
            total = 0.0
            cuts = min(accumulate, len(ids))
            for m in range(cuts):
                part = shard_of(len(ids), m, cuts)
                summed = loss(model(inputs[part]), labels[part]) * (part.stop - part.start)
                (summed / len(ids)).backward()
                total += summed.item()
            losses.append(total)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm).item())
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
    return {"weights": state(model), "ema": state(ema.module), "losses": losses, "norms": norms}


def training(world: World, name: str, norm: bool, accumulate: int) -> dict[str, Any]:
    optim, model, images = OPTIMIZERS[name], net(norm), numbered()
    order, read = Order(SAMPLES, BATCH, SEED), reader(images, world.device)
    loader = TrainLoader(images, order, augment(), world, read, accumulate)
    wrapped = parallelize(model, world)
    optimizer = optimizers.build(model, optim, optim.lr)
    rate = partial(schedule, optim)
    step = TrainStep(wrapped, loss, optimizer, clip_norm=optim.clip_norm, schedule=rate, seed=SEED)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))
    losses = []
    for epoch in loader.epochs(EPOCHS):
        for batch in epoch:
            losses.append(step(batch).item() * batch.count)
            ema.update_parameters(model)
    before = state(model)
    average_buffers(model, world.size)
    after = state(model)
    moved = max(float(np.abs(before[key] - after[key]).max()) for key in before)
    return {"weights": after, "ema": state(ema.module), "losses": losses, "moved by averaging": moved}


def was_read(world: World, batch: int, fraction: float, accumulate: int, kind: str, workers: int) -> dict[str, Any]:
    """Two epochs: the ledger, the samples that really came, and a digest of each sample as augmented."""
    images = numbered()
    order, read = Order(SAMPLES, batch, SEED, fraction), reader(images, world.device, kind, workers)
    loader = TrainLoader(images, order, augment(), world, read, accumulate)
    ledger, came, digests = EMPTY_LEDGER, [], {}
    for number, epoch in enumerate(loader.epochs(2)):
        for part in epoch:
            ledger = extend_ledger(ledger, part.all_ids)
            came.append((part.all_ids.tolist(), part.labels.tolist(), tuple(shard.size for shard in part.shards)))
            for label, image in zip(part.labels.tolist(), part.images, strict=True):
                digests[number, label] = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    return {"ledger": ledger.hex(), "came": came, "digests": digests}


def everything(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for batch, fraction in ORDERS:
        for way in WAYS:
            # worker processes are slow to start: where there are many ranks one each is enough, and for one order
            if way[2] and ((batch, fraction) != ORDERS[1] or way[2] * world.size > 4):
                continue
            found["data", batch, fraction, way] = was_read(world, batch, fraction, *way)
    for name in OPTIMIZERS:
        for accumulate in (1, 3):
            found["train", name, False, accumulate] = training(world, name, False, accumulate)
            found["train", name, True, accumulate] = training(world, name, True, accumulate)
    return found


@cache
def ranks_of(n: int) -> list[dict[str, Any]]:
    return run_ranks(everything, n, timeout=240, law=n == 2)


@pytest.mark.parametrize("n", WORLDS)
def test_the_ledger_and_the_samples_behind_it_are_the_same_on_any_number_of_ranks(n: int) -> None:
    ranks = ranks_of(n)
    cases: list[Any] = [key for key in ranks[0] if key[0] == "data"]
    assert {case[3][2] for case in cases} >= {0, 1}
    for case in cases:
        _, batch, fraction, (accumulate, _, _) = case
        order = Order(SAMPLES, batch, SEED, fraction)
        expected = [ids for epoch in range(2) for ids in order.steps(epoch)]
        ledger = EMPTY_LEDGER
        for ids in expected:
            ledger = extend_ledger(ledger, ids)
        assert {rank[case]["ledger"] for rank in ranks} == {ledger.hex()}, case
        for step, ids in enumerate(expected):
            came = [rank[case]["came"][step] for rank in ranks]
            assert all(global_ids == ids.tolist() for global_ids, _, _ in came), case
            # every sample of the batch is on one rank, once; nothing is padded
            assert sorted(label for _, labels, _ in came for label in labels) == sorted(ids.tolist()), (case, step)
            for m, sizes in enumerate(zip(*(sizes for _, _, sizes in came), strict=True)):
                assert max(sizes) - min(sizes) <= 1, (case, step)
                part = shard_of(len(ids), m, min(accumulate, len(ids)))
                assert sum(sizes) == part.stop - part.start, (case, step)


@pytest.mark.parametrize("n", WORLDS)
def test_a_sample_is_augmented_alike_on_any_rank_worker_and_loader(n: int) -> None:
    images = numbered()
    expected = {}
    for epoch in range(2):
        for sample in range(SAMPLES):  # alone in its batch, in this process
            pixels, _ = images.read(np.array([sample]))
            image = augment()(pixels, torch.tensor([sample]), epoch)[0]
            expected[epoch, sample] = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    assert len(set(expected.values())) == 2 * SAMPLES, "another epoch, another image"
    for rank in ranks_of(n):
        for case in rank:
            if case[0] == "data":
                for key, digest in rank[case]["digests"].items():
                    assert digest == expected[key], (case, key)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_agree_without_batch_norm(n: int, name: str, accumulate: int) -> None:
    whole = plain(name, False, 1)  # accumulation too must not matter
    assert len(whole["losses"]) == 20
    assert any(norm > OPTIMIZERS[name].clip_norm for norm in whole["norms"]), "clipping never happens: no test of it"
    assert any(norm < OPTIMIZERS[name].clip_norm for norm in whole["norms"]), "clipping always happens"
    for rank in ranks_of(n):
        agree(rank["train", name, False, accumulate], whole, 1e-10)


@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_weights_and_running_statistics_agree_with_batch_norm(n: int, name: str, accumulate: int) -> None:
    whole = plain(name, True, accumulate)
    assert np.abs(whole["weights"]["norm.running_mean"]).max() > 0.01
    for rank in ranks_of(n):
        found = rank["train", name, True, accumulate]
        agree(found, whole, 1e-8)
        # a rank with an empty share saw the others' statistics too: there is nothing for averaging to put right
        assert found["moved by averaging"] < 1e-12


def agree(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for part in ("weights", "ema"):
        assert found[part].keys() == expected[part].keys()
        for name, value in expected[part].items():
            assert found[part][name].dtype == value.dtype
            np.testing.assert_allclose(found[part][name], value, rtol=0, atol=tolerance, err_msg=f"{part} {name}")
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=0, atol=tolerance * BATCH)


def test_all_ranks_hold_the_same_bits() -> None:
    first, *others = ranks_of(3)
    for case in (key for key in first if key[0] == "train"):
        for other in others:
            for name, value in first[case]["weights"].items():
                assert np.array_equal(other[case]["weights"][name], value), (case, name)


def test_the_tolerance_would_show_a_mean_of_means() -> None:
    """What equal weights for unequal shares would do, so that 1e-10 is known to be a tight bound."""
    model, images, order = net(False), numbered(), Order(SAMPLES, BATCH, SEED)
    pixels, labels = images.read(order.step(0, 0))
    outputs = model(augment()(pixels, torch.from_numpy(order.step(0, 0)), 0))
    shares = [shard_of(BATCH, rank, 3) for rank in range(3)]
    means = torch.stack([loss(outputs[share], labels[share]) for share in shares]).mean()
    assert abs(means - loss(outputs, labels)).item() > 1e-4
