"""A finding of the audit: lint's code, what happened in numbers, and where."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.commands.audit.records import Record


@dataclass(frozen=True, order=True)
class Finding:
    """`says` has the numbers; `at` is the user's line, as "train.py:41"; `nproc` the number of processes it is of."""

    code: str
    at: str
    says: str
    nproc: int


Find = Callable[[list[Record]], Iterator[Finding]]


def times(count: int, thing: str) -> str:
    """A number with its thing: "1 sample", "2,500 samples"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
