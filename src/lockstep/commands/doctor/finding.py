"""What a check comes to, and how long it may take."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Status = Literal["ok", "warn", "fail", "skipped"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Finding:
    """One check's outcome, in words and in numbers; what is not well carries its remedy."""

    check: str
    status: Status
    message: str
    remedy: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)  # units are in the names


def ok(check: str, message: str, **numbers: Any) -> Finding:
    """All is well."""
    return Finding(check, "ok", message, "", numbers)


def warn(check: str, message: str, remedy: str, **numbers: Any) -> Finding:
    """A run would go, and worse than it could."""
    return Finding(check, "warn", message, remedy, numbers)


def fail(check: str, message: str, remedy: str, **numbers: Any) -> Finding:
    """A run would not go."""
    return Finding(check, "fail", message, remedy, numbers)


def skipped(check: str, message: str) -> Finding:
    """Nothing was checked; the message says why."""
    return Finding(check, "skipped", message)


def within(seconds: float, fn: Callable[..., _Value], *args: Any) -> _Value:
    """`fn(*args)`, which may block where no timeout reaches: a name service, a disk, a driver.

    Raises:
        TimeoutError: after so many seconds; the call is left behind in a thread of its own.
    """
    values: list[_Value] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            values.append(fn(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not values:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return values[0]
