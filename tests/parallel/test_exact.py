"""Exact mode gives the same bits on any number of processes, and plain DDP does not."""

import dataclasses
import random
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.checkpoint.weights import digest
from lockstep.config import Config, DataConfig, ModelConfig, OptimConfig, Precision
from lockstep.config.fields import with_values
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.parallel import determinism
from lockstep.training.assemble import assemble
from lockstep.training.evaluation import evaluate
from tests.ranks import alone, run_ranks


def small_net(in_channels: int, num_classes: int) -> nn.Module:
    """Batch norm, depthwise convolution, dropout, a counter and a parameter that two layers share."""
    shared = nn.Conv2d(16, 16, 3, padding=1, groups=16)
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), shared, nn.Dropout(0.2), shared,
        nn.BatchNorm2d(16, momentum=None), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, num_classes),
    )  # fmt: skip


BASE = Config(
    batch_size=50,  # 8 slices of 7 and 6
    exact=8,
    epochs=2,
    data=DataConfig(dataset="digits", fraction=0.15, crop_padding=1, flip=True, cutout=2),  # last batch: 16 samples
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=1e-3, warmup_epochs=0.5, clip_norm=1.0),
)


def changed(**values: Any) -> Config:
    config: Config = with_values(BASE, values)
    return config


CASES = {
    "sgd": BASE,
    "adamw, EMA, one-cycle": changed(optimizer="adamw", lr=0.01, ema=0.9, schedule="one-cycle"),
    "muon": changed(optimizer="timm:muon", lr=0.01),
    "adadelta, label smoothing": changed(optimizer="adadelta", lr=1.0, label_smoothing=0.1),
    "class weights": changed(class_weights="1.3,0.7,1,2.9,1,1.1,0.3,1,1.7,1"),
    "bf16, channels last": changed(precision="bf16", channels_last=True),
    "fewer samples than slices in the last batch": changed(fraction=53 / 1437),
}
QUICK = ("sgd", "adamw, EMA, one-cycle", "bf16, channels last", "fewer samples than slices in the last batch")
PLAIN = dataclasses.replace(BASE, exact=0, model=ModelConfig(model="mlp"), data=DataConfig(fraction=0.2))
SAME_AS_SGD = {
    "again": BASE,
    "accumulate": changed(accumulate=3),
    **{f"streaming, {count} worker(s)": changed(loader="streaming", workers=count) for count in range(3)},
}


def trained(world: World, config: Config) -> tuple[str, ...]:
    """Digests of the weights and of the average, every rank's loss total, and the metrics."""
    run = assemble(config, world)
    losses = []
    for epoch in range(config.epochs):
        for batch in run.train.epoch(epoch):
            losses.append(run.step(batch).item())
            if run.ema is not None:
                run.ema.update_parameters(run.model)
    metrics = evaluate(run.evaluated, run.val, world, config.precision)
    return digest(run.model), digest(run.evaluated), repr(losses), repr(metrics)


def all_cases(world: World, cases: dict[str, Config]) -> dict[str, tuple[str, ...]]:
    return {name: trained(world, config) for name, config in cases.items()}


def check_digests(alone: dict[str, tuple[str, ...]], ranks: list[dict[str, tuple[str, ...]]]) -> None:
    assert len({alone[name][0] for name in ranks[0]}) == len(ranks[0])  # the cases do differ from each other
    for rank, results in enumerate(ranks):
        for name, result in results.items():
            assert result == alone[name], f"{name}: rank {rank} of {len(ranks)}"


@pytest.mark.slow(15)
def test_one_digest_where_ranks_have_no_slice_in_the_last_batch() -> None:
    (alone,) = run_ranks(all_cases, 1, {**CASES, **SAME_AS_SGD}, timeout=120, law=True)
    for name in SAME_AS_SGD:
        assert alone[name] == alone["sgd"], name
    check_digests(alone, run_ranks(all_cases, 5, CASES, timeout=180))


def poisoned(world: World, precision: Precision) -> tuple[list[bool], bool]:
    """One rank's slice overflows: what do the ranks' gradients say, and do the weights stay?"""
    run = assemble(changed(model="mlp", clip_norm=0.0, precision=precision), world)
    batch = next(run.train.epoch(0))
    if world.rank == world.size - 1:
        batch.images[0] = float("inf")
    seen: list[bool] = []
    run.step.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(bool(p.grad.isnan().all()) for p in run.model.parameters() if p.grad is not None)
    )
    before = digest(run.model)
    run.step(batch)
    return seen, digest(run.model) == before


OF_ONE = changed(model="mlp", fraction=0.0341, batch_size=24)
WEIGHTS = OptimConfig(optimizer="sgd", class_weights="1,2,1,3,1,1,4,1,1,0.5")
IN_THE_FIRST_STEP = {  # what all ranks have to know then
    "a scale": dataclasses.replace(OF_ONE, precision="fp16"),
    "that the loss has a denominator": dataclasses.replace(OF_ONE, optim=WEIGHTS),
}


def steps_of_one(world: World) -> dict[str, str]:
    """The last batch of an epoch has one sample, and the step over it is the process's first, as after a resume."""
    found = {}
    for name, config in IN_THE_FIRST_STEP.items():
        run = assemble(config, world)
        (batch,) = run.train.epoch(0, 2)
        assert batch.count == 1
        loss = run.step(batch)
        run.step(next(run.train.epoch(1)))
        found[name] = f"{digest(run.model)} {loss.item()!r}"
    return found


def everything(world: World) -> dict[str, Any]:
    return {
        "steps of one": steps_of_one(world),
        "plain": trained(world, PLAIN)[0],
        "cases": all_cases(world, {name: CASES[name] for name in QUICK}),
        "poisoned": {name: poisoned(world, name) for name in ("fp32", "fp16")},
    }


@cache
def by_one() -> dict[str, Any]:
    return alone(everything)


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return run_ranks(everything, 3, timeout=120)


def test_one_digest_where_the_ranks_do_not_divide_the_slices(three: list[dict[str, Any]]) -> None:
    check_digests(by_one()["cases"], [rank["cases"] for rank in three])


def test_the_canary_plain_ddp_differs(three: list[dict[str, Any]]) -> None:
    """If adding floats gave one digest too, the test above would prove nothing."""
    assert by_one()["plain"] != three[0]["plain"]


def test_a_non_finite_slice_is_seen_by_all_ranks_alike(three: list[dict[str, Any]]) -> None:
    answers = [rank["poisoned"]["fp32"][0] for rank in three]
    assert all(any(seen) for seen in answers)
    assert len({tuple(seen) for seen in answers}) == 1
    assert all(rank["poisoned"]["fp16"][1] for rank in three), "the scaler's decision is one for all"


def test_a_rank_without_a_slice_in_its_first_step_goes_with_the_others(three: list[dict[str, Any]]) -> None:
    assert [rank["steps of one"] for rank in three] == [by_one()["steps of one"]] * 3


class Centred(nn.Module):
    """Calls a collective in forward, where there are several processes."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(64 * in_channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.fc(x.flatten(1))
        mean = h.mean(0).detach()
        if self.training and torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
        return h - mean


def of_first_step(world: World) -> str:
    run = assemble(changed(model=f"{__name__}:Centred"), world)
    with pytest.raises(UserError) as refused:
        run.step(next(run.train.epoch(0)))
    return refused.value.message


class Noisy(nn.Linear):
    """Holds generators of its own, which nobody has seeded."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(64 * in_channels, num_classes)
        self.rng, self.legacy, self.plain = np.random.default_rng(), np.random.RandomState(), random.Random()
        self.torchs = torch.Generator()
        self.torchs.seed()


def of_generators(world: World) -> list[object]:
    model: Any = assemble(changed(exact=0, model=f"{__name__}:Noisy"), world).model
    drawn = torch.rand(1, generator=model.torchs).item()
    return [model.rng.random(), model.legacy.rand(), model.plain.random(), drawn]


def of_devices(world: World) -> str:
    """What is said of ranks on unlike processors."""
    name = ("Xeon", "EPYC")[world.rank]
    with mock.patch.object(determinism, "device_name", return_value=name), pytest.raises(UserError) as refused:
        determinism.configure(world)
    return refused.value.message


def compared(world: World) -> tuple[str, list[object], str]:
    return of_first_step(world), of_generators(world), of_devices(world)


def test_ranks_refuse_alike_and_begin_alike() -> None:
    first, second = run_ranks(compared, 2, law=True)
    assert first == second
    collective, _, devices = first
    assert "device is Xeon on rank 0 and EPYC on rank 1" in devices
    assert collective == of_first_step(World.single()) == "--exact: forward or backward calls a collective, allreduce"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"batch_norm": "global"}, "--batch-norm global"),
        ({"compile": True}, "--compile"),
        ({"strategy": "fsdp"}, "reduce-scatter adds floats"),
        ({"precision": "tf32"}, "TF32"),
        ({"exact": 51}, "a slice needs a sample"),
        ({"nproc": 9}, "can't be shared out over 9 processes"),
    ],
)
def test_what_can_not_be_exact_is_refused_with_the_reason(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        changed(**change)


class Unrepeatable(nn.Linear):
    """put_ overwrites in an order of its own: torch has no deterministic form of it."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(64 * in_channels, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1).put(torch.zeros(2, dtype=torch.int64), torch.ones(2)))


def test_an_operator_without_a_deterministic_kernel_is_named() -> None:
    config = changed(model=f"{__name__}:Unrepeatable")
    with pytest.raises(UserError, match=r"--exact 8: put_.*\n.*Replace that operator"):
        alone(trained, config)
