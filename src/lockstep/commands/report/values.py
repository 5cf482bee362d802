"""Values of a journal that another version, a crash or a stranger may have written: what does not fit is not there."""

import math
from collections.abc import Mapping
from typing import Any


def number(record: Mapping[str, Any], name: str) -> float | None:
    """A finite number; None for anything else, as for the text that stands for NaN."""
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def count(record: Mapping[str, Any], name: str) -> int | None:
    """A whole number that is not negative, and no larger than floats tell apart."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def text(record: Mapping[str, Any], name: str) -> str:
    """A text; empty for anything else."""
    value = record.get(name)
    return value if isinstance(value, str) else ""


def group(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Named values; none for anything else."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def texts(record: Mapping[str, Any], name: str) -> list[str]:
    """A list's texts."""
    value = record.get(name)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def counts(record: Mapping[str, Any], name: str) -> list[int]:
    """A list of whole numbers that are not negative; empty for anything else."""
    value = record.get(name)
    if not isinstance(value, list):
        return []
    found = [count({"": item}, "") for item in value]
    return [item for item in found if item is not None] if None not in found else []


def pruned(value: Any, depth: int = 8) -> Any:
    """A value from JSON without what is nested deeper than anything of ours is; whole numbers that JSON can hold."""
    if isinstance(value, dict):
        return {key: pruned(item, depth - 1) for key, item in value.items()} if depth else "..."
    if isinstance(value, list):
        return [pruned(item, depth - 1) for item in value] if depth else "..."
    return str(value)[:40] if isinstance(value, int) and abs(value) >= 1 << 63 else value
