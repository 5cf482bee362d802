"""More values as watch/outside.py takes them from a journal: what does not fit is not there."""

from collections.abc import Mapping
from typing import Any


def count(record: Mapping[str, Any], name: str) -> int | None:
    """A whole number that is not negative, and no larger than floats tell apart."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


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
