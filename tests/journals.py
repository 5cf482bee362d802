"""A run's journal as tests read it: any field of any record, by its name."""

from pathlib import Path
from typing import Any, cast

from lockstep.monitoring import journal


def read(path: Path) -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], journal.read(path))
