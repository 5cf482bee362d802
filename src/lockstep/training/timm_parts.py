"""timm's optimizers and schedules by name, where timm is installed: `--optimizer timm:lamb`, `--schedule timm:poly`."""

import importlib
import importlib.util
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from lockstep.config import OptimConfig
from lockstep.errors import UserError, unknown

PREFIX = "timm:"
# these want a backward pass of their own, kernels of other packages, or a generator that no checkpoint holds
_LEFT_OUT = ("adahessian", "bnb", "fused", "kron")


def check(optim: OptimConfig) -> None:
    """Raise UserError where timm or what it is asked for is not there."""
    asked = [f"--{kind} {name}" for kind, name in (("optimizer", optim.optimizer), ("schedule", optim.schedule))
             if name.startswith(PREFIX)]  # fmt: skip
    if asked and importlib.util.find_spec("timm") is None:
        raise UserError(f"{asked[0]}: timm is not installed", "pip install 'lockstep-torch[timm]'")
    name = optim.optimizer.removeprefix(PREFIX)
    if optim.optimizer.startswith(PREFIX) and name not in (known := optimizers()):
        raise unknown(
            "optimizer of timm", name, known, "--optimizer timm:NAME takes those that need nothing but torch."
        )


def optimizers() -> list[str]:
    """The names that `--optimizer timm:NAME` takes."""
    listed = importlib.import_module("timm.optim").list_optimizers()
    return [name for name in map(str, listed) if not name.startswith(_LEFT_OUT)]


def optimizer(optim: OptimConfig, parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """timm's optimizer over parameters or groups of them; --momentum reaches those that have one."""
    check(optim)
    create = importlib.import_module("timm.optim").create_optimizer_v2
    name = optim.optimizer.removeprefix(PREFIX)
    made: torch.optim.Optimizer = create(
        list(parameters), name, lr=lr, weight_decay=optim.weight_decay, momentum=optim.momentum
    )
    return made


def shape(optim: OptimConfig, progress: float, epochs: int) -> float:
    """A schedule of timm's as a part of the peak after `progress` epochs; --gamma is poly's power.

    timm steps its schedules by epochs; they are formulas, so they have values between two as well.
    """
    scheduler = _scheduler(optim.schedule.removeprefix(PREFIX), epochs, optim.gamma)
    scheduler.step(progress)
    rate = scheduler.optimizer.param_groups[0]["lr"]
    return float(rate) if math.isfinite(rate) else 0.0


@cache
def _scheduler(name: str, epochs: int, gamma: float) -> Any:
    create = importlib.import_module("timm.scheduler").create_scheduler_v2
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler, _ = create(stand_in, sched=name, num_epochs=epochs, decay_rate=gamma, warmup_epochs=0)
    return scheduler
