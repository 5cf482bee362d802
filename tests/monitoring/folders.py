"""Made run folders, for the tests of what looks at runs from outside."""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from lockstep.config import Config
from lockstep.config.recipes import recipe
from lockstep.distributed.files import LOCK

LEDGER, WEIGHTS = "5a63b02a" * 8, "c0ffee00" * 8
ANY_VALUE = st.recursive(  # what may stand in a field of a damaged or strange record
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def records(
    config: Config | None = None,
    *,
    status: str = "completed",
    tops: Iterable[float] = (0.5, 0.75),
    processes: int = 2,
    began: float = 1000.0,
    **ended: Any,
) -> list[dict[str, Any]]:
    """A journal: two log steps and an evaluation an epoch, and an `end` record unless `status` is empty."""
    config = config or recipe("digits")
    run = {"kind": "run", "time": began, "config": config.to_dict(), "world": {"size": processes, "backend": "gloo"}}
    run |= {"devices": ["cpu"] * processes, "threads": 1, "versions": {"torch": "2.11.0"}, "resumed_from": 0}
    run |= {"steps_per_epoch": 20, "data": {"name": config.data.dataset, "fingerprint": "f00d" * 16}}
    found: list[dict[str, Any]] = [run | {"parameters": 9000}]
    step = 0
    for epoch, top1 in enumerate(tops):
        for _ in range(2):
            step += 10
            found.append({"kind": "step", "time": began + step, "step": step, "epoch": epoch, "samples": 64 * step})
            found[-1] |= {"lr": 0.1, "loss": 1 / step, "images_per_s": 1234.5, "data_wait_ms": 0.5}
        found.append({"kind": "eval", "time": began + step, "epoch": epoch, "step": step, "top1": top1, "loss": 0.25})
        found.append({"kind": "classes", "time": began + step, "epoch": epoch, "step": step, "classes": ["a", "b"]})
    if status:
        end = {"kind": "end", "time": began + step + 1, "status": status, "steps": step, "seconds": 20.5}
        found.append(end | {"ledger_sha256": LEDGER, "weights_sha256": WEIGHTS, "processes": processes} | ended)
    return found


def write(folder: Path, found: Iterable[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    found = list(found)
    (folder / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    if found and found[0]["kind"] == "run":
        (folder / "config.json").write_text(json.dumps(found[0]["config"]))
    return folder


def locked(folder: Path, pid: int, host: str | None = None) -> None:
    """A lock file as a process leaves it that was killed, or that holds the folder on another machine."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    (folder / LOCK).write_text(json.dumps({"host": host or socket.gethostname(), "pid": pid, "since": since}))


def gone() -> int:
    """The id of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid
