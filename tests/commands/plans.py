"""Small runs to verify."""

from dataclasses import fields
from typing import Any

from lockstep.commands.verify.plan import Plan
from lockstep.config import CommConfig, Config, DataConfig, Execution, ModelConfig, OptimConfig, SamplesConfig
from lockstep.config.execution import Law

HERE = "tests.commands.variants"


def plan_for(*nproc: int, patch: str = "", steps: int = 4, vary: bool = False, law: Law = "warn", **given: Any) -> Plan:
    """A small run; further fields by name, whichever part of the config they belong to."""
    given = {"batch_size": 24, "model": "bare_net", "dataset": "small", "lr": 0.05} | given
    given |= {name: f"{HERE}:{given[name]}" for name in ("model", "dataset") if ":" not in given[name]}
    patch = patch if not patch or ":" in patch else f"{HERE}:{patch}"

    def part(cls: type) -> Any:
        return cls(**{field.name: given.pop(field.name) for field in fields(cls) if field.name in given})

    groups = {
        "data": DataConfig,
        "samples": SamplesConfig,
        "model": ModelConfig,
        "optim": OptimConfig,
        "comm": CommConfig,
    }
    parts: dict[str, Any] = {name: part(cls) for name, cls in groups.items()}
    execution = Execution(device="cpu", threads=1, eval_batch_size=7, workers=1, law=law)
    config = Config(epochs=3, execution=execution, **{**parts, **given})
    return Plan(nproc=nproc, vary=vary, steps=steps, patch=patch, config=config)
