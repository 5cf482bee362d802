"""timm's optimizers under their names are timm's, and what can't work is said."""

import pytest
import torch
from timm.optim._optim_factory import create_optimizer_v2
from torch import nn
from torch.nn.utils import prune

from lockstep.config import Config, Execution, OptimConfig
from lockstep.errors import UserError
from lockstep.training import optimizers
from lockstep.training.moving_average import Average
from lockstep.training.optimizers import build
from lockstep.training.run_folder import check


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", ["lamb", "lion", "adan", "rmsprop", "nadamw", "muon"])
def test_an_optimizer_by_name_is_timms_with_the_configs_values(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optim = OptimConfig(optimizer=f"timm:{name}", momentum=0.8, weight_decay=0.1)
    wanted = create_optimizer_v2(list(theirs.parameters()), name, lr=0.01, weight_decay=0.1, momentum=0.8)
    assert torch.equal(stepped(ours, build(ours, optim, 0.01)), stepped(theirs, wanted))


def test_what_can_not_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, near in (("lambb", "lamb"), ("bnbadam", "nadam"), ("kron", "")):
        with pytest.raises(UserError, match=f"unknown optimizer of timm '{name}'") as caught:
            check(Config(optim=OptimConfig(optimizer=f"timm:{name}")))
        assert near in caught.value.remedy
    with pytest.raises(UserError, match=r"--strategy fsdp with --optimizer timm:lamb: timm's take norms"):
        Config(optim=OptimConfig(optimizer="timm:lamb"), execution=Execution(strategy="fsdp"))
    monkeypatch.setattr("lockstep.training.optimizers.importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"--optimizer timm:lamb: timm is not installed"):
        optimizers.require_timm(OptimConfig(optimizer="timm:lamb"))


def test_a_warmed_up_average_has_the_decays_of_its_formula() -> None:
    model = prune.identity(nn.Linear(1, 1, bias=False).double(), "weight")  # which copy.deepcopy refuses
    average = Average(model, 0.5, warmup=True).double()
    expected = 0.0
    for t in range(20):
        with torch.no_grad():
            model.weight_orig.fill_(float(t * t))
        average.update_parameters(model)
        decay = min(0.5, (1 + t) / (10 + t)) if t else 0.0  # the first takes the weights as they are
        expected = decay * expected + (1 - decay) * t * t
        assert average.module.weight_orig.item() == pytest.approx(expected, rel=1e-12)
