"""Schedules against torch's own at epoch ends, and their laws."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from lockstep.config import OptimConfig
from lockstep.training.schedules import WARMUP_START, factor, never_reached

SCHEDULES = ("constant", "step", "multistep", "cosine", "one-cycle")


def _config(schedule: str, **options: object) -> OptimConfig:
    return OptimConfig(lr=1.0, schedule=schedule, milestones=(2, 5), step_epochs=3, gamma=0.5, **options)  # type: ignore[arg-type]


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def _rates(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("constant", lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
        ("step", lambda o: lr_scheduler.StepLR(o, 3, 0.5)),
        ("multistep", lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5)),
        ("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8)),
        ("linear", lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=8)),
    ],
)
def test_epochs_begin_at_the_rates_of_torchs_schedulers(schedule: str, make: object) -> None:
    theirs = _rates(make(_optimizer()), 9)
    ours = [factor(_config(schedule), epoch * 37, 37, 8) for epoch in range(9)]
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_one_cycle_is_torchs_with_its_defaults() -> None:
    steps = 10_000  # torch counts steps and ends one before the last, so they agree to about 1 / steps
    theirs = _rates(lr_scheduler.OneCycleLR(_optimizer(), max_lr=1.0, total_steps=steps), steps - 1)
    ours = [factor(_config("one-cycle"), step * 4, 8000, 5) for step in range(steps - 1)]
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert factor(_config("one-cycle"), 12_000, 8000, 5) == 1.0
    assert factor(_config("one-cycle"), 40_000, 8000, 5) == pytest.approx(1 / 25e4)


def test_warmup_and_cosine_are_torchs_linear_then_cosine() -> None:
    optimizer, per_epoch = _optimizer(), 10
    linear = lr_scheduler.LinearLR(optimizer, start_factor=WARMUP_START, total_iters=2 * per_epoch)
    assert _rates(linear, 20) == pytest.approx(
        [factor(_config("cosine", warmup_epochs=2), step, per_epoch, 8) for step in range(20)], abs=1e-12
    )
    cosine = lr_scheduler.CosineAnnealingLR(_optimizer(), T_max=6 * per_epoch)
    assert _rates(cosine, 61) == pytest.approx(
        [factor(_config("cosine", warmup_epochs=2), 20 + step, per_epoch, 8) for step in range(61)], abs=1e-12
    )


runs = {
    "schedule": st.sampled_from(SCHEDULES),
    "warmup": st.sampled_from([0.0, 0.3, 1.0, 2.5, 20.0]),
    "per_epoch": st.integers(1, 100_000),
    "epochs": st.integers(1, 300),
    "at": st.floats(0, 1.2),
    "later": st.floats(0, 1.2),
}


@given(**runs)
def test_bounded_and_monotone_in_its_pieces(
    schedule: str, warmup: float, per_epoch: int, epochs: int, at: float, later: float
) -> None:
    config, total = _config(schedule, warmup_epochs=warmup), per_epoch * epochs
    first, second = sorted((int(at * total), int(later * total)))
    a, b = (factor(config, samples, per_epoch, epochs) for samples in (first, second))
    assert 0 <= a <= 1
    assert first >= total or a > 0, "a step at rate zero is a step wasted"
    end_of_rise = 0.3 * total if schedule == "one-cycle" else warmup * per_epoch
    if first >= max(end_of_rise, warmup * per_epoch):
        assert b <= a + 1e-12, "falls after its rise"
    elif second <= end_of_rise and schedule in ("constant", "cosine", "one-cycle"):
        assert b >= a - 1e-12, "rises until its peak"


@given(schedule=st.sampled_from(SCHEDULES), batches=st.tuples(st.integers(1, 64), st.integers(1, 64)))
def test_the_rate_at_a_sample_does_not_know_the_batch_size(schedule: str, batches: tuple[int, int]) -> None:
    config, meeting = _config(schedule, warmup_epochs=1), math.lcm(*batches)
    rates = [{s: factor(config, s, meeting, 10) for s in range(0, 10 * meeting, batch)} for batch in batches]
    common = rates[0].keys() & rates[1].keys()
    assert common
    assert all(rates[0][s] == rates[1][s] for s in common)


def test_drops_fall_on_their_sample_where_epochs_are_fractions() -> None:
    assert 1.1 * 50 > 55, "rounding puts the boundary behind its sample"
    config = OptimConfig(schedule="step", step_epochs=1.1, gamma=0.5)
    assert [factor(config, s, 50, 5) for s in (0, 54, 55, 109, 110)] == [1, 1, 0.5, 0.5, 0.25]
    config = OptimConfig(schedule="multistep", milestones=(2.2, 1.1), gamma=0.5)
    assert [factor(config, s, 50, 5) for s in (54, 55, 109, 110)] == [1, 0.5, 0.5, 0.25]


def test_what_lies_beyond_a_run_s_end_is_noted() -> None:
    assert never_reached(_config("multistep", warmup_epochs=5), 6) == []
    assert never_reached(_config("cosine", warmup_epochs=5), 5) == [
        "note: --warmup-epochs 5 of 5: --lr is never reached"
    ]
    assert never_reached(_config("multistep"), 5) == ["note: --milestones 5: there is no such drop in 5 epoch(s)"]
    assert never_reached(_config("multistep"), 2) == ["note: --milestones 2,5: there is no such drop in 2 epoch(s)"]
