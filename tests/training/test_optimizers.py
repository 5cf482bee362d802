"""The optimizers by name."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import OptimConfig
from lockstep.errors import UserError
from lockstep.training.optimizers import build

NAMES = ("sgd", "adam", "adamw", "adadelta", "timm:muon", "muon-sgd")


def _model() -> nn.Sequential:
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return nn.Sequential(*layers)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _by_shape(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Norms and biases are not decayed."""
    vectors = [p for p in parameters if p.ndim == 1]
    return [{"params": [p for p in parameters if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, weight_decay=0.01)),
        ("adam", lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.01)),
        ("adamw", lambda p: torch.optim.AdamW(_by_shape(list(p)), 0.05, weight_decay=0.01)),
        ("adadelta", lambda p: torch.optim.Adadelta(p, 0.05, weight_decay=0.01)),
    ],
)
def test_a_name_is_torchs_optimizer_with_the_configs_values(name: str, theirs: object) -> None:
    ours, reference = _model(), _model()
    config = OptimConfig(optimizer=name, momentum=0.8, weight_decay=0.01)
    _steps(ours, build(ours, config, 0.05), 3)
    _steps(reference, theirs(reference.parameters()), 3)
    assert torch.equal(_weights(ours), _weights(reference))


def test_nesterov_reaches_sgd() -> None:
    optimizer = build(_model(), OptimConfig(nesterov=True), 0.1)
    assert optimizer.param_groups[0]["nesterov"] is True


@pytest.mark.parametrize("name", NAMES)
def test_real_optimizers_frozen_parameters_and_initial_lr(name: str) -> None:
    model = _model()
    model[0].requires_grad_(False)
    config = OptimConfig(optimizer=name)
    optimizer = build(model, config, 0.3)
    assert isinstance(optimizer, torch.optim.Optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(group["initial_lr"] == group["lr"] for group in optimizer.param_groups)
    peaks = {group["lr"] for group in optimizer.param_groups}
    assert 0.3 in peaks if name == "muon-sgd" else peaks == {0.3}  # SGD's rates there are its own


@pytest.mark.parametrize("name", [*NAMES, "timm:lamb", "timm:lion"])
def test_state_goes_round_through_a_dict_and_training_goes_on_the_same(name: str) -> None:
    config = OptimConfig(optimizer=name)
    model = _model()
    optimizer = build(model, config, 0.01)
    _steps(model, optimizer, 3)
    resumed = copy.deepcopy(model)
    state = copy.deepcopy(optimizer.state_dict())
    _steps(model, optimizer, 3, first=3)
    other = build(resumed, config, 0.9)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.01
    _steps(resumed, other, 3, first=3)
    assert torch.equal(_weights(model), _weights(resumed))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_on_a_gpu_the_kernels_are_fused_and_steps_are_the_cpus(name: str) -> None:
    config = OptimConfig(optimizer=name)
    model = _model()
    optimizer = build(model.cuda(), config, 0.01)
    assert optimizer.param_groups[-1]["fused"] is True
    before = _weights(model)
    model(torch.randn(8, 3, 6, 6).cuda()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, _weights(model))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("torch.optim:SGD", "is an optimizer's class, not a factory"),
        ("os:getpid", r"can't be called with \(model, optim, lr\)"),
        ("builtins:dict", r"can't be called with \(model, optim, lr\)"),
        ("builtins:print", "returned a NoneType, not a torch optimizer"),
    ],
)
def test_what_is_no_factory_is_refused(path: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        build(nn.Linear(2, 2), OptimConfig(optimizer=path), 0.1)
    assert "The factory gets (model, optim, lr)" in str(refused.value)


def test_a_module_that_ends_the_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script_that_runs.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="importing script_that_runs ended the program, exit code 0"):
        build(nn.Linear(2, 2), OptimConfig(optimizer="script_that_runs:make"), 0.1)
