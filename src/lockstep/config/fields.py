"""Types of flags and the checks of their values."""

import dataclasses
import math
import re
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from lockstep.errors import UserError


def split_commas(text: str) -> tuple[str, ...]:
    """The parts of `a,b,c`, without spaces around them and without empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _comma_separated(of: type, metavar: str) -> PrimitiveConstructorSpec[Any]:
    """A flag that takes `a,b,c` as one argument, as `--gpus 0,2` is written everywhere else."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: tuple(of(part) for part in split_commas(args[0])),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(str(part) for part in value)],
    )


def split_spaces(text: str) -> tuple[str, ...]:
    """The parts of `a:1,2 b`. A space after a comma, a bracket or an equals sign parts nothing."""
    return tuple(re.sub(r"([,(\[=])\s+", r"\1", text).split())


@dataclasses.dataclass(frozen=True)
class Several:
    """Marks a flag that takes all values up to the next flag, and may be given again."""


Ints = Annotated[tuple[int, ...], _comma_separated(int, "INT,INT,...")]
Floats = Annotated[tuple[float, ...], _comma_separated(float, "FLOAT,FLOAT,...")]
Names = Annotated[tuple[str, ...], _comma_separated(str, "NAME,NAME,...")]
Calls = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs=1,  # lockstep.config.flags has put the values together
        metavar="NAME[:VALUE,...] ...",
        instance_from_str=lambda args: split_spaces(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [" ".join(value)],
    ),
    Several(),
]


def require_finite(group: Any) -> None:
    """Raise UserError for a field of a config group that is NaN or infinite."""
    for item in dataclasses.fields(group):
        value = getattr(group, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"--{item.name.replace('_', '-')} {number} is not a finite number", "Give a number.")


def require(condition: object, message: str, remedy: str = "") -> None:
    """Raise UserError where the condition does not hold."""
    if not condition:
        raise UserError(message, remedy)


def require_at_least(least: int, group: Any, *names: str) -> None:
    """Raise UserError for a field of a config group that is less than 0, or than 1."""
    for name in names:
        flag, value = name.replace("_", "-"), getattr(group, name)
        wrong = "not positive" if least else "negative"
        require(value >= least, f"--{flag} {value} is {wrong}", f"Use {least} or more.")
