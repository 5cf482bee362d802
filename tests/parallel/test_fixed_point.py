import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.parallel.fixed_point import NON_FINITE, ZERO, _largest, exponents, from_fixed, scales, to_fixed


def exact_sum(contributions: list[torch.Tensor]) -> torch.Tensor:
    """What ExactSync does to one tensor, in one process."""
    largest = exponents(contributions).max()
    into, out_of = scales(largest, len(contributions), contributions[0].dtype)
    total = sum((to_fixed(c, into) for c in contributions), torch.zeros_like(contributions[0], dtype=torch.int64))
    return from_fixed(total, out_of, torch.empty_like(contributions[0]))


magnitudes = st.floats(min_value=-126, max_value=120)


@given(
    slices=st.integers(1, 64),
    top=magnitudes,
    spread=st.floats(0, 60),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_order_and_grouping_change_no_bit(
    slices: int, top: float, spread: float, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(top - spread * torch.rand(slices, 50, generator=generator, dtype=torch.float64))
    parts = list((torch.randn(slices, 50, generator=generator, dtype=torch.float64) * scale).to(dtype))
    order = torch.randperm(slices, generator=generator).tolist()
    assert torch.equal(exact_sum(parts), exact_sum([parts[i] for i in order]))


@given(slices=st.integers(1, 64), top=st.floats(-60, 120), seed=st.integers(0, 2**31))
def test_rounding_stays_below_2_to_the_minus_30_of_the_largest(slices: int, top: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # exponents from the top down by 50 binary orders within one tensor
    scale = torch.exp2(top - 50 * torch.rand(slices, 200, generator=generator, dtype=torch.float64))
    parts = list((torch.randn(slices, 200, generator=generator, dtype=torch.float64) * scale).float())
    into, out_of = scales(exponents(parts).max(), slices, torch.float32)
    total = sum((to_fixed(p, into) for p in parts), torch.zeros(200, dtype=torch.int64))
    error = (total.double() * out_of.double() - torch.stack(parts).double().sum(0)).abs().max()
    assert error <= torch.stack(parts).abs().max().double() * 2.0**-30


def test_small_gradients_keep_their_bits_beside_large_ones() -> None:
    torch.manual_seed(0)
    for magnitude in (1e-12, 1e-6, 1.0, 1e4):  # one model's tensors; a scale for all of them would lose the first
        parts = [torch.randn(1000) * magnitude for _ in range(8)]
        reference = torch.stack(parts).double().sum(0)
        error = (exact_sum(parts).double() - reference).abs().max()
        plain = (sum(parts[1:], parts[0]).double() - reference).abs().max()
        assert error < plain  # nearer to float64 than adding float32 one by one, as an all-reduce does
        assert error <= reference.abs().max() * 2.0**-24  # the one rounding to float32


def test_the_largest_values_do_not_overflow() -> None:
    biggest = torch.full((4,), torch.finfo(torch.float32).max / 64)
    for slices in (1, 2, 7, 64):
        assert torch.allclose(exact_sum([biggest] * slices).double(), biggest.double() * slices, rtol=1e-7)
        into, _ = scales(exponents([biggest]).max(), slices, torch.float32)
        assert sum(int(to_fixed(biggest, into)[0]) for _ in range(slices)) < 2**63


def test_zeros_and_non_finite_values() -> None:
    e = exponents(
        [torch.zeros(3), torch.tensor([math.nan, 1.0]), torch.tensor([-math.inf]), torch.tensor([0.75, -3.0])]
    )
    assert e.tolist() == [ZERO, NON_FINITE, NON_FINITE, 2]
    assert torch.equal(exact_sum([torch.zeros(3)] * 4), torch.zeros(3))
    poisoned = exact_sum([torch.ones(3), torch.tensor([1.0, math.nan, 1.0])])
    assert poisoned.isnan().all()  # on every rank, wherever the NaN came from


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(100).to(dtype) for _ in range(4)]
    reference = torch.stack(parts).double().sum(0)
    assert torch.allclose(exact_sum(parts).double(), reference, rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert torch.equal(exact_sum(parts), exact_sum(parts[::-1]))


def test_the_largest_of_a_device_s_tensors_are_those_of_the_host_s() -> None:
    """An accelerator takes the infinity norms of all by a few kernels."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensors = [torch.randn(3, 4, 2, 2), torch.randn(()), torch.zeros(5), -torch.ones(2)]
        tensors = [t.to(dtype) for t in [*tensors, torch.tensor([1.0, math.nan]), torch.tensor([math.inf, 1.0])]]
        norms = torch.stack(torch._foreach_norm(tensors, math.inf)).to(torch.float64)
        assert torch.equal(norms.nan_to_num(-1), _largest(tensors).nan_to_num(-1))


class _Counting(TorchDispatchMode):
    """Counts operators that compute, each of which is a kernel or more on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def test_on_a_device_scales_take_as_many_operators_for_many_tensors_as_for_one() -> None:
    def count(tensors: list[torch.Tensor]) -> int:
        with _Counting() as counting:
            scales(exponents(tensors), 8, torch.float32)
        return counting.count

    few, many = (count([torch.empty(3, 4, device="meta") for _ in range(n)]) for n in (1, 40))
    assert few == many
    assert count([torch.empty(3, 4) for _ in range(40)]) > many + 40, "a host's go one by one"
