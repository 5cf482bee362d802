"""One cell of a comparison: `lockstep train` in a process of its own, and what its journal records."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.commands.compare.folder import replace_text
from lockstep.commands.shared.arguments import start_training
from lockstep.commands.shared.measured import watch_others
from lockstep.config import Config
from lockstep.watch.journal import end_of, read
from lockstep.watch.records import Record

WARMUP_STEPS = 20
_CTRL_C_S, _SIGTERM_S = 5.0, 30.0  # that a run gets to end after each, before the next


class NotMeasured(Exception):
    """A run gave no result; the message says why."""


def run(config: Config, folder: Path) -> dict[str, Any]:
    """Train by `config` and return what was measured; it is kept as result.json, and what exists is not run again.

    Raises:
        NotMeasured: with the command's own message.
    """
    kept, output = folder / "result.json", folder / "output.txt"
    if kept.exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that did not end
    folder.mkdir(parents=True)
    others = watch_others()
    if code := wait_for(start_training(config.with_execution(out=str(folder / "run")), output)):
        raise NotMeasured(printed_error(output.read_text(encoding="utf-8", errors="replace")) or f"exit code {code}")
    shutil.rmtree(folder / "run" / "weights", ignore_errors=True)  # of every cell and round they would fill the disk
    result = measure(read(folder / "run" / "journal.jsonl"), config.model.compile) | {"others_cores": others()}
    replace_text(kept, json.dumps(result, indent=1) + "\n")
    return result


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Run a command to its end; where this process is stopped, the command ends first."""
    try:
        return process.wait()
    except BaseException as error:
        # a terminal's Ctrl-C has reached the command as well, and a second signal would hasten it
        if not (isinstance(error, KeyboardInterrupt) and _ended(process, _CTRL_C_S)):
            process.terminate()
            if not _ended(process, _SIGTERM_S):
                process.kill()
                process.wait()
        raise


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def printed_error(output: str) -> str:
    """The first line of the last message that a command printed as its own: `lockstep: MESSAGE`."""
    lines = [line.removeprefix("lockstep: ").strip() for line in output.splitlines() if line.startswith("lockstep: ")]
    rest = [line.strip() for line in output.splitlines() if line.strip()]
    return (lines or rest or [""])[-1]


def measure(records: Sequence[Record], compiled: bool = False) -> dict[str, Any]:
    """What one journal records: seconds, images/s, fractions of the step spent waiting, memory, accuracy, digest.

    Training alone is what the `step` records cover, without the first WARMUP_STEPS steps, or the first epoch of a
    compiled model; at most half of the windows are left out. With one window nothing would remain: then the figures
    of the step are None.

    Raises:
        NotMeasured: where the run is not complete.
    """
    end = end_of(records)
    if end is None or end["status"] != "completed":
        reason = end.get("error", end["status"]) if end is not None else "no end record"
        raise NotMeasured(f"the run did not complete: {reason}")
    steps = [r for r in records if r["kind"] == "step"]
    epochs = 1 + max((r["epoch"] for r in steps), default=0)
    starts = [(0, 0), *((r["step"], r["samples"]) for r in steps)]
    warm = max(WARMUP_STEPS, end["steps"] // epochs if compiled else 0)
    skip = min(sum(step < warm for step, _ in starts[:-1]), len(steps) // 2)
    # of each log window that counts: its steps, its samples, its record
    windows = [(r["step"] - step, r["samples"] - samples, r) for (step, samples), r in zip(starts, steps, strict=False)]
    kept = windows[skip:] if skip else []
    samples, seconds = sum(n for _, n, _ in kept), sum(n / r["images_per_s"] for _, n, r in kept)

    def share(waits: list[float | None]) -> float | None:
        """The fraction of the time that was spent waiting; `waits`: ms in each step of the windows."""
        known = [count * ms for (count, _, _), ms in zip(kept, waits, strict=True) if ms is not None]
        return sum(known) / 1e3 / seconds if kept and len(known) == len(kept) else None

    memory = end["peak_memory_gib"]
    return {
        "seconds_per_epoch": seconds / samples * end["samples"] / epochs if kept else None,
        "total_s": end["seconds"],
        "images_per_s": samples / seconds if kept else None,
        "data_wait": share([r["data_wait_ms"] for _, _, r in kept]),
        "communication": share([r["comm_wait_ms"] for _, _, r in kept]),
        "memory_sum_gib": sum(memory) if memory else None,
        "memory_largest_gib": max(memory, default=None),
        "memory_smallest_gib": min(memory, default=None),
        "memory_gib": memory,  # of each process; of one process that drives several devices, of each device
        "top1": end["top1"],
        "ledger_sha256": end["ledger_sha256"],
        "device": next((" and ".join(dict.fromkeys(r["devices"])) for r in records if r["kind"] == "run"), ""),
        "warmup_windows": skip,
        "windows": len(windows),
    }
