"""The optimizer of the cifar10-speed recipe, and the names that stand in its config.json."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.config import OptimConfig
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError
from lockstep.models import cifar10_speed as experiment
from lockstep.models.cifar10_speed import MuonSGD, orthogonal
from lockstep.training.optimizers import build


@given(rows=st.integers(2, 24), columns=st.integers(2, 24), seed=st.integers(0, 100))
@settings(max_examples=25)
def test_an_orthogonal_update_has_the_singular_vectors_and_none_of_the_sizes(
    rows: int, columns: int, seed: int
) -> None:
    torch.manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rows, min(rows, columns)))
    v, _ = torch.linalg.qr(torch.randn(columns, min(rows, columns)))
    # bfloat16 and three steps bring sizes that differ by a factor of 3 to within half of 1
    matrix = u * torch.linspace(1.0, 3.0, u.shape[1]) @ v.T
    sizes = torch.linalg.svdvals(orthogonal(matrix))
    assert 0.4 < sizes.min() <= sizes.max() < 1.5
    assert torch.linalg.matrix_norm(orthogonal(matrix) - u @ v.T, 2) < 0.6
    # a power of two changes no digit; anything in between only rounds
    torch.testing.assert_close(orthogonal(matrix * 1024), orthogonal(matrix), atol=1e-4, rtol=0)


def parts() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4, bias=False))
    return model, torch.randn(5, 3, 6, 6)


def test_filters_keep_their_size_and_the_rest_is_torchs_sgd() -> None:
    model, images = parts()
    twin, _ = parts()
    ours = build(model, OptimConfig("muon-sgd", momentum=0.6, weight_decay=0.01), 0.1)
    rates = {group["kind"]: group["lr"] for group in ours.param_groups}
    theirs = torch.optim.SGD(
        [
            {
                "params": [p for p in twin.parameters() if p.ndim == dim],
                "lr": rates[kind],
                "weight_decay": 0.01 / rates[kind],
            }
            for kind, dim in (("biases", 1), ("linear", 2))
        ],
        momentum=0.85,
        nesterov=True,
    )
    for _ in range(3):
        grads = torch.autograd.grad(model(images).square().mean() / 1e3, list(model.parameters()))
        for net in (model, twin):
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter.grad = grad.clone()
        before = model[0].weight.detach().clone()
        ours.step()
        theirs.step()
        filters = model[0].weight.detach()
        scaled = before * (8**0.5 / before.norm())
        moved = (filters - scaled).norm().item()
        assert 0.5 * 0.1 * 8**0.5 < moved < 1.5 * 0.1 * 8**0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim != 4:
            torch.testing.assert_close(parameter, dict(twin.named_parameters())[name])


def test_each_group_keeps_its_own_rate_and_schedules_scale_it() -> None:
    model, _ = parts()
    optimizer = build(model, OptimConfig(optimizer="muon-sgd"), 0.24)
    assert isinstance(optimizer, MuonSGD)
    peaks = [group["initial_lr"] for group in optimizer.param_groups]
    assert peaks == [group["lr"] for group in optimizer.param_groups]
    assert len(set(peaks)) == 3


def not_an_optimizer(model: nn.Module, optim: OptimConfig, lr: float) -> str:
    return f"{model} {optim} {lr}"


def test_a_factory_that_returns_something_else_is_told_so() -> None:
    with pytest.raises(UserError, match="returned a str, not a torch optimizer"):
        build(nn.Linear(2, 2), OptimConfig(optimizer="tests.models.test_cifar10_speed:not_an_optimizer"), 0.1)
    with pytest.raises(UserError, match="adamw"):
        OptimConfig(optimizer="adamv")


def test_no_recipe_names_a_file_of_ours() -> None:
    """A path into this package, in a user's config.json, would end the resume when the file moves."""
    for name in RECIPES:
        assert "lockstep." not in json.dumps(recipe(name).to_dict()), name
    speed = recipe("cifar10-speed")
    assert (speed.model.model, speed.optim.optimizer) == ("speed_net", "muon-sgd")


def test_the_file_tells_what_its_recipe_does() -> None:
    """Its figures are the recipe's, its settings those that the text names."""
    text, config = " ".join(str(experiment.__doc__).split()), recipe("cifar10-speed")
    measured = " ".join(str(RECIPES["cifar10-speed"].__doc__).split())
    for figure in ("94.06 %", "93.88 %", "7.2 minutes", "six views", "lockstep train cifar10-speed"):
        assert figure in text
        assert figure in measured
    assert f"Batch {config.batch_size:,} in {config.precision}; the rate falls from {config.optim.lr} to 0" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_largest_activation_is_torchs_with_its_gradient(dtype: torch.dtype, memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (6, 5, 3, 3)).to(dtype)  # equal ones in nearly every channel
    x[0, 0, 1, 1] = torch.nan
    x[0, 1, 0, 0] = -torch.inf
    ours, theirs = (x.clone().to(memory_format=memory).requires_grad_() for _ in range(2))
    weights = torch.randn(6, 5).to(dtype)
    out, expected = experiment.LargestOf()(ours), nn.AdaptiveMaxPool2d(1)(theirs).flatten(1)
    assert torch.equal(out.nan_to_num(9), expected.nan_to_num(9))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
