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
from lockstep.config import Config
from lockstep.watch.journal import Record, StepRecord, end_of, read

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
    if code := _wait(start_training(config.with_execution(out=str(folder / "run")), output)):
        raise NotMeasured(printed_error(output.read_text(encoding="utf-8", errors="replace")) or f"exit code {code}")
    shutil.rmtree(folder / "run" / "weights", ignore_errors=True)  # of every cell and round they would fill the disk
    result = measure(read(folder / "run" / "journal.jsonl"), config.model.compile)
    replace_text(kept, json.dumps(result, indent=1) + "\n")
    return result


def _wait(process: subprocess.Popen[bytes]) -> int:
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
    epochs = 1 + max((r["epoch"] for r in records if r["kind"] == "step"), default=0)
    windows = _windows([r for r in records if r["kind"] == "step"])
    warm = max(WARMUP_STEPS, end["steps"] // epochs if compiled else 0)
    skip = min(sum(w["start"] < warm for w in windows), len(windows) // 2)
    kept = windows[skip:] if skip else []
    seconds, samples = sum(w["seconds"] for w in kept), sum(w["samples"] for w in kept)

    def share(key: str) -> float | None:
        if not kept or any(w[key] is None for w in kept):
            return None
        return float(sum(w[key] * w["steps"] for w in kept) / 1e3 / seconds)

    memory = end["peak_memory_gib"]
    return {
        "seconds_per_epoch": seconds / samples * end["samples"] / epochs if kept else None,
        "total_s": end["seconds"],
        "images_per_s": samples / seconds if kept else None,
        "data_wait": share("data_wait_ms"),
        "communication": share("comm_wait_ms"),
        "memory_sum_gib": sum(memory) if memory else None,
        "memory_largest_gib": max(memory, default=None),
        "memory_smallest_gib": min(memory, default=None),
        "memory_gib": memory,  # of each process; of one process that drives several devices, of each device
        "top1": end["top1"],
        "ledger_sha256": end["ledger_sha256"],
        "device": next((r["device"] for r in records if r["kind"] == "run"), ""),
        "warmup_windows": skip,
        "windows": len(windows),
    }


def _windows(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Each log window: its first step, steps, samples, seconds, and milliseconds of waiting in each step."""
    out, step, samples = [], 0, 0
    for r in steps:
        counts = {"start": step, "steps": r["step"] - step, "samples": r["samples"] - samples}
        waits = {"data_wait_ms": r["data_wait_ms"], "comm_wait_ms": r["comm_wait_ms"]}
        out.append(counts | waits | {"seconds": (r["samples"] - samples) / r["images_per_s"]})
        step, samples = r["step"], r["samples"]
    return out
