"""What a check comes to, how it is printed, and how long it may take."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.text import Text

Status = Literal["ok", "warn", "fail", "skipped"]
_Value = TypeVar("_Value")
_COLOURS: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
_COUNTED: dict[Status, str] = {"ok": "ok", "warn": "warning(s)", "fail": "failure(s)", "skipped": "skipped"}
_CHECK = 18  # characters


@dataclass(frozen=True)
class Finding:
    """One check's outcome, in words and in numbers; what is not well carries its remedy."""

    check: str
    status: Status  # warn: a run would go, and worse than it could; fail: it would not go
    message: str
    remedy: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)  # units are in the names


def graded(check: str, message: str, numbers: dict[str, Any], *cases: tuple[bool, Status, str]) -> Finding:
    """The finding with status and remedy of the first (condition, status, remedy) that is true; ok where none is."""
    status, remedy = next(((status, remedy) for true, status, remedy in cases if true), ("ok", ""))
    return Finding(check, status, message, remedy, numbers)


def within(seconds: float, fn: Callable[..., _Value], *args: Any) -> _Value:
    """`fn(*args)`, which may block where no timeout reaches: a name service, a disk.

    Raises:
        TimeoutError: after so many seconds; the call is left behind in a thread of its own.
    """
    future: Future[_Value] = Future()

    def call() -> None:
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future.result(seconds)


def show(finding: Finding, console: Console | None = None) -> None:
    """Print one line, and the remedy below where there is one."""
    console = console or Console(highlight=False)
    line = Text(f"{finding.status:<8}", style=_COLOURS[finding.status])
    line.append(f"{finding.check:<{_CHECK}} ", style="bold").append(finding.message, style="default")
    console.print(line, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':<8}{'':<{_CHECK}} -> {finding.remedy}"), soft_wrap=True)


def summary(found: list[Finding]) -> str:
    """How many are how."""
    counts = Counter(finding.status for finding in found)
    return ", ".join(f"{counts[status]} {name}" for status, name in _COUNTED.items())


def healthy(found: list[Finding]) -> bool:
    """True where no check failed."""
    return all(finding.status != "fail" for finding in found)


def as_json(found: list[Finding]) -> str:
    """All findings, for programs."""
    return json.dumps({"healthy": healthy(found), "findings": [asdict(each) for each in found]}, indent=2)
