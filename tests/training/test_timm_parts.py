"""timm's optimizers and schedules under their names are timm's, and what can't work is said."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.tanh_lr import TanhLRScheduler
from torch import nn

from lockstep.config import Config, Execution, OptimConfig, ScheduleName
from lockstep.errors import UserError
from lockstep.training import timm_parts
from lockstep.training.average import Average
from lockstep.training.folder import check
from lockstep.training.optimizers import build
from lockstep.training.schedules import WARMUP_START, factor


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", ["lamb", "lion", "adan", "rmsprop", "nadamw"])
def test_an_optimizer_by_name_is_timms_with_the_configs_values(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optim = OptimConfig(optimizer=f"timm:{name}", momentum=0.8, weight_decay=0.1)
    wanted = create_optimizer_v2(list(theirs.parameters()), name, lr=0.01, weight_decay=0.1, momentum=0.8)
    assert torch.equal(stepped(ours, build(ours, optim, 0.01)), stepped(theirs, wanted))


_THEIRS: dict[ScheduleName, tuple[Any, dict[str, Any]]] = {
    "timm:cosine": (CosineLRScheduler, {}),
    "timm:tanh": (TanhLRScheduler, {}),
    "timm:poly": (PolyLRScheduler, {"power": 0.9}),
}


@given(st.sampled_from(list(_THEIRS)), st.integers(0, 700), st.integers(1, 6))
def test_a_schedule_by_name_has_timms_values_at_epochs_and_is_a_function_of_samples(
    name: ScheduleName, samples: int, epochs: int
) -> None:
    kind, options = _THEIRS[name]
    theirs = kind(torch.optim.SGD([torch.zeros(1)], lr=1.0), t_initial=epochs, lr_min=0.0, **options)
    optim = OptimConfig(schedule=name, gamma=0.9)
    for epoch in range(epochs):
        theirs.step(epoch)
        assert factor(optim, 100 * epoch, 100, epochs) == pytest.approx(theirs.optimizer.param_groups[0]["lr"])
    before = factor(optim, samples, 100, epochs)
    factor(optim, 3, 100, epochs)  # whatever was asked in between
    assert factor(optim, samples, 100, epochs) == before
    assert 0 <= before <= 1
    warm = dataclasses.replace(optim, warmup_epochs=1.0)
    assert factor(warm, 0, 100, epochs) == pytest.approx(WARMUP_START * factor(optim, 0, 100, epochs))


def test_what_can_not_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, near in (("lambb", "lamb"), ("bnbadam", "nadam"), ("kron", "")):
        with pytest.raises(UserError, match=f"unknown optimizer of timm '{name}'") as caught:
            check(Config(optim=OptimConfig(optimizer=f"timm:{name}")))
        assert near in caught.value.remedy
    with pytest.raises(UserError, match=r"--strategy fsdp with --optimizer timm:lamb: timm's optimizers take norms"):
        Config(optim=OptimConfig(optimizer="timm:lamb"), execution=Execution(strategy="fsdp"))
    monkeypatch.setattr("lockstep.training.timm_parts.importlib.util.find_spec", lambda _: None)
    for optim in (OptimConfig(optimizer="timm:lamb"), OptimConfig(schedule="timm:poly")):
        with pytest.raises(UserError, match=r"--(optimizer timm:lamb|schedule timm:poly): timm is not installed"):
            timm_parts.check(optim)


def test_a_warmed_up_average_has_the_decays_of_its_formula() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    average = Average(model, 0.5, warmup=True).double()
    expected = 0.0
    for t in range(20):
        with torch.no_grad():
            model.weight.fill_(float(t * t))
        average.update_parameters(model)
        decay = min(0.5, (1 + t) / (10 + t)) if t else 0.0  # the first takes the weights as they are
        expected = decay * expected + (1 - decay) * t * t
        assert average.module.weight.item() == pytest.approx(expected, rel=1e-12)
