"""torch's fused operators of batch normalisation, by stand-ins that compute what theirs do on CUDA, and on a GPU."""

import pytest
import torch
from torch import Tensor

from lockstep.parallel import batchnorm


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims, _ = batchnorm.channels(x)
    variance = x.var(dims, correction=0)
    return x.mean(dims), torch.where((variance != 0) | (eps != 0), (variance + eps).rsqrt(), 0.0)


def _reduce(
    dy: Tensor, x: Tensor, mean: Tensor, r: Tensor, weight: Tensor | None, x_g: bool, weight_g: bool, bias_g: bool
) -> tuple[Tensor | None, ...]:
    del weight
    dims, shape = batchnorm.channels(x)
    sum_dy, sum_dy_xmu = dy.sum(dims), (dy * (x - mean.view(shape))).sum(dims)
    both = (sum_dy, sum_dy_xmu) if x_g else (None, None)
    return *both, sum_dy_xmu * r if weight_g else None, sum_dy if bias_g else None


def _elemt(
    dy: Tensor, x: Tensor, mean: Tensor, r: Tensor, weight: Tensor | None, sum_dy: Tensor, sum_xmu: Tensor, n: Tensor
) -> Tensor:
    assert n.dtype == torch.int32
    _, shape = batchnorm.channels(x)
    centred = (x - mean.view(shape)) * (r * r * sum_xmu / n.sum()).view(shape)
    gain = r if weight is None else r * weight
    return (dy - (sum_dy / n.sum()).view(shape) - centred) * gain.view(shape)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in (("stats", _stats), ("backward_reduce", _reduce), ("backward_elemt", _elemt)):
        monkeypatch.setattr(torch, f"batch_norm_{name}", stand_in)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("shape", [(6, 3), (5, 3, 4), (4, 3, 2, 5)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_fused_operators_are_put_together_to_the_same(
    shape: tuple[int, ...], affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 2
    x[:, 2] = 7.0  # no spread at all: 1 / sqrt(0)
    weight, dy = torch.randn(3, dtype=torch.float64) if affine else None, torch.randn_like(x)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(batchnorm, "fused", lambda x, fused=fused: fused)
        mean, squares = batchnorm.statistics(x)
        r, count = (squares / 40 + 1e-5).rsqrt(), torch.tensor(40.0, dtype=torch.float64)
        sums, finish = batchnorm.backward(dy, x, mean, r, weight)
        found.append((mean, squares, sums, finish(sums * 1.5, count)))
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_the_fused_operators_are_declared_as_they_are_called() -> None:
    """Their kernels are there on CUDA alone, and what they take everywhere."""
    declared = {
        name: [argument.name for argument in getattr(torch.ops.aten, f"batch_norm_{name}").default._schema.arguments]
        for name in ("stats", "backward_reduce", "backward_elemt")
    }
    first = ["grad_out", "input", "mean", "invstd", "weight"]
    assert declared == {
        "stats": ["input", "eps"],
        "backward_reduce": [*first, "input_g", "weight_g", "bias_g"],
        "backward_elemt": [*first, "sum_dy", "sum_dy_xmu", "count"],
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_fused_operators_compute_what_the_plain_ones_do(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    for memory in (torch.contiguous_format, torch.channels_last):
        x, dy = (torch.randn(8, 16, 5, 7, device="cuda", dtype=dtype).to(memory_format=memory) for _ in range(2))
        weight, found = torch.randn(16, device="cuda"), []
        for fused in (False, True):
            monkeypatch.setattr(batchnorm, "fused", lambda x, fused=fused: fused)
            mean, squares = batchnorm.statistics(x)
            r, count = (squares / 280 + 1e-5).rsqrt(), torch.tensor(280.0, device="cuda", dtype=mean.dtype)
            sums, finish = batchnorm.backward(dy, x, mean, r, weight)
            found.append((mean, squares, sums, finish(sums, count).to(dtype)))
        for plain, ours in zip(*found, strict=True):
            rtol, atol = (2e-2, 2e-2) if plain.dtype == torch.bfloat16 else (1e-4, 1e-3)
            torch.testing.assert_close(ours, plain, rtol=rtol, atol=atol)
