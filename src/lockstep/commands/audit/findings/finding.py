"""A finding of the audit: lint's code, what happened in numbers, and where."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.commands.audit.records import Record

APART = "LS501"  # no rule of lint's: the weights on N processes are others than on one, and nothing above says why


@dataclass(frozen=True, order=True)
class Finding:
    """`says` has the numbers; `at` is the user's line, as "train.py:41"; `nproc` the number of processes it is of.

    A note is nothing to mend: it says what differs by choice.
    """

    code: str
    at: str
    says: str
    nproc: int
    note: bool = False


Find = Callable[[list[Record]], Iterator[Finding]]


def times(count: int, thing: str, more: str = "") -> str:
    """A number with its thing: "1 sample", "2,500 samples"."""
    return f"{count:,} {thing if count == 1 else more or thing + 's'}"
