"""What each precision switches, allows and refuses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lockstep.errors import UserError
from lockstep.training.precision import autocast, configure, scaler

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _tf32() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_tf32_goes_off_for_products_and_convolutions(precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    configure(precision, CPU)
    assert _tf32() == (False, False)
    assert torch.backends.cudnn.conv.fp32_precision != "tf32"  # type: ignore[attr-defined]
    assert torch.get_float32_matmul_precision() == "highest"


def test_tf32_goes_on_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.training.precision._has_tf32", lambda device: True)
    configure("tf32", torch.device("cuda", 0))
    assert _tf32() == (True, True)


def test_what_a_device_lacks_is_refused_and_nothing_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _tf32()
    with pytest.raises(UserError, match=r"cpu .*has no TF32"):
        configure("tf32", CPU)
    monkeypatch.setattr("lockstep.training.precision._has_bf16", lambda device: False)
    with pytest.raises(UserError, match=r"bfloat16[^$]*--precision fp16"):
        configure("bf16", CPU)
    assert _tf32() == before


@pytest.mark.parametrize("use", [configure, autocast, scaler])
def test_a_misspelt_precision_is_not_fp32(use: object) -> None:
    with pytest.raises(UserError, match="Did you mean bf16"):
        use("bf61", CPU)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_gives_its_dtype_and_can_be_entered_again(precision: str, dtype: torch.dtype) -> None:
    context, layer = autocast(precision, CPU), torch.nn.Linear(4, 4)
    for _ in range(2):
        with context():
            assert layer(torch.randn(2, 4)).dtype == dtype
        assert layer(torch.randn(2, 4)).dtype == torch.float32


def test_only_fp16_scales_and_a_non_finite_gradient_skips_the_step() -> None:
    assert [scaler(p, CPU) for p in ("fp32", "tf32", "bf16")] == [None] * 3
    scale = scaler("fp16", CPU)
    assert scale is not None
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for gradient, expected in ((1.0, 0.5), (float("inf"), 0.5)):
        before = scale.get_scale()
        optimizer.zero_grad()
        scale.scale(weight * gradient).sum().backward()
        scale.step(optimizer)
        scale.update()
        assert weight.item() == expected
    assert scale.get_scale() < before


def test_fp32_takes_back_the_newer_switches_too() -> None:
    backends: Any = torch.backends
    places = [backends, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]
    places += [backends.mkldnn, backends.mkldnn.conv, backends.mkldnn.matmul]
    for first, *others in [(place,) for place in places] + [tuple(places)]:
        for place in (first, *others):
            place.fp32_precision = "tf32"
        configure("fp32", CPU)
        assert not any(place.fp32_precision == "tf32" for place in places)
        assert not torch.backends.cudnn.allow_tf32, "may be read"
        assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.gpu
def test_on_a_gpu_fp32_convolutions_are_exact_and_tf32_ones_are_not() -> None:
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    x, w = torch.randn(8, 64, 32, 32, device=device), torch.randn(64, 64, 3, 3, device=device)
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    errors = {}
    for precision in ("fp32", "tf32"):
        configure(precision, device)
        errors[precision] = (torch.nn.functional.conv2d(x, w).double() - exact).abs().max().item()
    assert errors["fp32"] < 1e-3 < errors["tf32"]
