"""Configs of tools whose --nproc is a list, of which each run takes one number."""

from dataclasses import dataclass, field, fields
from typing import Any

from tyro.conf import Fixed

from lockstep.config import Config, Execution


@dataclass(frozen=True)
class Elsewhere(Execution):
    """An execution without a number of processes of its own."""

    nproc: Fixed[Any] = "auto"


@dataclass(frozen=True)
class Counted(Config):
    """A config whose number of processes is somewhere else."""

    execution: Elsewhere = field(default_factory=Elsewhere)

    @classmethod
    def of(cls, config: Config) -> "Counted":
        """The config, its number of processes left out."""
        counted: Counted = retyped(config, cls, execution=retyped(config.execution, Elsewhere))
        return counted


def retyped(value: Any, cls: type[Any], **changed: Any) -> Any:
    """A dataclass's fields, some of them changed, as another dataclass with the same ones."""
    return cls(**{f.name: getattr(value, f.name) for f in fields(value)} | changed)
