"""The run's journal: one JSON object a line, written by rank 0, flushed at once."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Mirror = Callable[[Record], None]


class Journal:
    """`journal.write("step", step=1, ...)` appends a record and passes it to the mirrors; without a path, nothing."""

    def __init__(self, path: Path | None, mirrors: tuple[Mirror, ...] = ()) -> None:
        self.file = path.open("a", encoding="utf-8") if path else None
        self.mirrors = mirrors

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record of a kind (run, step, eval, checkpoint, fault, end) with the time in seconds since 1970."""
        if self.file is None:
            return
        record = {"kind": kind, "time": round(time.time(), 3), **fields}
        self.file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self.file.flush()
        for mirror in self.mirrors:
            mirror(record)

    def close(self) -> None:
        """Close the file; mirrors close themselves on the `end` record."""
        if self.file is not None:
            self.file.close()


def read(path: Path) -> list[Record]:
    """All records of a journal. A last line that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return records


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
