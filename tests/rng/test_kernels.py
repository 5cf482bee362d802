"""The numbers themselves: their values, their distribution, and that nothing shows of where they come from."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.randomness import GOLDEN, bits, bits_np, stream
from lockstep.rng import draws

ROWS, PLACES = 64, 16384


def keys(rows: int = ROWS, step: int = 0) -> Tensor:
    return bits(stream(0, "draws", step), torch.arange(rows))


def z_of_mean(values: Tensor, mean: float, variance: float) -> float:
    """Standard deviations between a sample's mean and what it should be."""
    return float((values.double().mean() - mean) / math.sqrt(variance / values.numel()))


@pytest.mark.parametrize("count", [1, 7, 40000])
def test_words_are_splitmix64_on_any_layout(count: int) -> None:
    rows = keys(3)
    found = draws.words(rows, count).numpy().view(np.uint64)
    for row, key in zip(found, rows.tolist(), strict=True):
        assert np.array_equal(row, bits_np(key, np.arange(count)))
    assert torch.equal(draws.words(rows[1:2], count)[0], draws.words(rows, count)[1])


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.25, 0.5, 1 / 3, 0.99999, 1.0])
def test_a_mask_keeps_at_its_rate(p: float) -> None:
    mask = draws.keep(keys(), PLACES - 1, p)
    rate = draws.keep_rate(p)
    assert mask.shape == (ROWS, PLACES - 1)
    assert abs(rate - (1 - p)) <= 2**-17
    if 0 < rate < 1:
        assert abs(z_of_mean(mask, rate, rate * (1 - rate))) < 4
    else:
        assert mask.all() == (rate == 1) == mask.any()


def test_a_masks_draws_have_no_visible_pattern() -> None:
    drawn, others = (draws.words(keys(step=t), PLACES // 4).view(torch.int16).double() + 32768 for t in (0, 1))
    n = drawn.numel()  # 2**20, from 0 to 65535
    assert abs(z_of_mean(drawn, 65535 / 2, (65536**2 - 1) / 12)) < 4
    counts = torch.bincount(drawn.flatten().long() >> 6, minlength=1024).double()
    chi = float(((counts - n / 1024) ** 2 / (n / 1024)).sum())
    assert abs(chi - 1023) / math.sqrt(2 * 1023) < 4
    unit, others = ((d - 65535 / 2) / math.sqrt((65536**2 - 1) / 12) for d in (drawn, others))
    pairs = {
        "step": (unit, others),
        "sample": (unit[1:], unit[:-1]),
        **{f"lag {lag}": (unit[:, lag:], unit[:, :-lag]) for lag in (1, 2, 3, 4, 5, 8, 16)},
    }
    for name, (a, b) in pairs.items():
        assert abs(float((a * b).mean()) * math.sqrt(a.numel())) < 4.5, name


def test_unmixed_keys_would_be_seen() -> None:
    """Why keys are hashes: rows of neighbouring keys, spaced as their words are, are one sequence, shifted."""
    raw = draws.words(torch.arange(ROWS) * GOLDEN, 64)
    assert torch.equal(raw[1:, :-1], raw[:-1, 1:])
    assert not torch.equal(draws.words(keys(), 64)[1:, :-1], draws.words(keys(), 64)[:-1, 1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_1(dtype: torch.dtype) -> None:
    found = draws.uniform(keys(), 4096, dtype)
    assert found.dtype == dtype
    assert found.min() >= 0
    assert found.max() < 1
    step = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, 0.0)
    assert abs(z_of_mean(found, 0.5 - step / 2, 1 / 12)) < 4


def test_normal_and_exponential_numbers_have_their_moments() -> None:
    normal = draws.normal(keys(), 4096)
    assert abs(z_of_mean(normal, 0, 1)) < 4
    assert abs(z_of_mean(normal**2, 1, 2)) < 4
    assert abs(z_of_mean(normal**4, 3, 96)) < 4
    exponential = draws.exponential(keys(), 4096)
    assert exponential.min() > 0
    assert abs(z_of_mean(exponential, 1, 1)) < 4
    assert abs(z_of_mean(exponential**2, 2, 20)) < 4
