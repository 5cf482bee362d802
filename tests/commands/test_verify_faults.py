"""Planted faults: verify names each by its category, its step or its tensor, and says of right runs that they hold."""

from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.commands.verify.report import Report
from lockstep.commands.verify.run import verify
from tests.commands.plans import plan_for
from tests.pool import Pool

FAULTS = "tests.commands.faults"

# fault -> the run it is planted into, the cause that is named, what the finding says
PLANTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "wrong_denominator": ({}, "not found", "step 1: gradient norm, gradients"),
    "tiny_factor": ({}, "not found", "gradient"),
    "one_parameter_not_reduced": ({}, "replicas", "1.bias"),
    "divided_twice": ({}, "gradient scale", "divided once too often"),
    "clipped_by_share": ({"clip_norm": 0.1}, "clipping", "without clipping"),
    "half_precision_sum": ({}, "not found", "step 1: gradient norm, gradients"),
    "nan_on_two": ({}, "not found", "step 3"),
    "overflow_on_two": ({"precision": "fp16"}, "overflow", "step 2 is left out with N = 2 alone"),
    "outgrown_float32": ({}, "overflow", "not finite on one N alone at step 1"),
    "skipped_on_one_rank": ({}, "replicas", "from step 2"),
    "skipped_on_two": ({}, "not found", "step 3: weights"),
    "remainder_dropped": ({"accumulate": 3}, "accumulation", "without accumulation"),
    "momentum_drifts": ({}, "replicas", "momentum_buffer"),
    "momentum_lost": ({}, "not found", "step 2: optimizer (momentum_buffer"),
    "decay_by_size": ({}, "not found", "step 1: optimizer"),
    "average_of_one_rank": ({"ema": 0.9}, "replicas", "ema."),
    "overlapping_shares": ({}, "shares", "taken twice"),
    "missing_sample": ({}, "shares", "from step 1"),
    "slices_by_size": ({"exact": 4}, "shares", "pieces of a batch depend on N"),
    "shifted_labels": ({}, "data set", "images of a step depend on N"),
    "normalised_by_share": ({}, "augmentation", "without augmentation"),
    "mixed_within_the_share": ({"mixup": 0.4, "cutmix": 1.0, "batch_size": 26}, "mixing", "without mixing"),
    "warmup_by_share": ({"warmup_epochs": 2}, "learning rate", "without learning rate"),
    "epoch_of_its_own": ({}, "order", "from step 1"),
    "own_noise": ({"exact": 4}, "dropout", "without dropout"),
    "forgotten_seed": ({"exact": 4}, "dropout", "without dropout"),
    "centred_by_share": ({}, "not found", "step 1: loss"),
    "buffers_of_one_rank": ({"model": f"{FAULTS}:averaging_net"}, "replicas", "0.mean of rank 1"),
    "unaligned_slices": ({"exact": 4, "model": f"{FAULTS}:addressed_net"}, "memory alignment", "memory of its own"),
    "kernel_by_size": ({"exact": 4}, "kernels", "outputs round otherwise in step 1"),
    "padded_evaluation": ({}, "evaluation", "30 samples are counted with N = 1, and 37 here"),
    "written_by_size": ({"exact": 4}, "what is written", "weights_sha256"),
}

RIGHT: dict[str, dict[str, Any]] = {
    "exact": {"exact": 4, "flip": True, "ema": 0.9, "clip_norm": 0.1, "warmup_epochs": 1},
    "exact, of uneven slices": {"exact": 5, "batch_size": 23},
    "exact, dropout and batch norm": {"exact": 3, "model": "dropping_net"},
    "exact, fp16": {"exact": 3, "precision": "fp16"},
    "exact, a buffer that is replaced": {"exact": 3, "model": "centred_net"},
    "plain, mixed": {"batch_size": 23, "mixup": 0.4, "cutmix": 1.0, "flip": True},
    "exact, balanced and repeated": {"exact": 5, "balance": "equal", "aug_repeats": 2, "loss": "focal", "mixup": 0.4},
    "plain, weighted": {"class_weights": "auto", "loss": "bce", "balance": "none", "batch_size": 23},
    "plain, dropout and batch norm": {"model": "dropping_net"},
    "plain, batch norm over groups": {"model": "normed_net", "batch_norm": "groups:5"},
    "plain": {"flip": True, "ema": 0.9, "clip_norm": 0.1},
    "plain, uneven micro-batches": {"accumulate": 3, "batch_size": 23},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as found:
        yield found


def _verified(pool: Pool, *nproc: int, **given: Any) -> Report:
    return verify(plan_for(*nproc, **given), start=pool.start)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(name: str, pool: Pool) -> None:
    given, cause, said = PLANTED[name]
    report = _verified(pool, 1, 2, patch=f"{FAULTS}:{name}", **given)
    found = {n: [(each.name, each.finding) for each in causes] for n, causes in report.causes.items()}
    assert [named for named, _ in found.get(2, [])] == [cause], found
    assert said in found[2][0][1], found
    assert not report.holds


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_holds(name: str, pool: Pool) -> None:
    report = _verified(pool, 1, 2, 3, **RIGHT[name])
    assert report.holds, report.causes
    assert not report.causes
    if not RIGHT[name].get("exact"):
        assert report.found.float64, "rounding is shown, not taken for granted"
        assert max(report.found.float64.values()) < report.found.bound <= 1e-8
