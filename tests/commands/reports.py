"""Runs for reports: journals as a training leaves them, and what makes them hard to read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.recipes import recipe

Record = dict[str, Any]


def run(time: float, size: int = 2, resumed_from: int = 0, config: dict[str, Any] | None = None) -> Record:
    return {
        "kind": "run", "time": time, "config": Config().to_dict() if config is None else config,
        "world": {"size": size, "local_size": size, "backend": "gloo"}, "pids": list(range(size)),
        "devices": ["cpu (AVX2)"] * size, "threads": 1, "versions": {"lockstep": "0.1.0", "torch": "2.15.0"},
        "data": {"name": "digits/train", "fingerprint": "f" * 64}, "parameters": 1234, "resumed_from": resumed_from,
        "steps_per_epoch": 5, "notes": ["a note"],
    }  # fmt: skip


def step(time: float, number: int, epoch: int = 0, loss: Any = 1.0, **others: Any) -> Record:
    return {
        "kind": "step", "time": time, "step": number, "epoch": epoch, "samples": 10 * number, "lr": 0.1, "loss": loss,
        "images_per_s": 100.0, "data_wait_ms": 10.0, "comm_wait_ms": 20.0, **others,
    }  # fmt: skip


def evaluation(time: float, number: int, epoch: int, top1: float = 0.5) -> Record:
    return {
        "kind": "eval", "time": time, "epoch": epoch, "step": number, "top1": top1, "top5": 0.9, "loss": 0.7,
        "count": 10, "macro_precision": 0.5, "macro_recall": 0.5, "macro_f1": 0.5, "calibration_error": 0.1,
    }  # fmt: skip


def classes(time: float, number: int, names: Iterable[str] = ("ant", "bee")) -> Record:
    names, size = list(names), len(list(names))
    confusion = [[5 if row == k else 1 if k == row + 1 else 0 for k in range(size)] for row in range(size)]
    return {
        "kind": "classes", "time": time, "epoch": 0, "step": number, "classes": names,
        "images": [sum(row) for row in confusion], "predicted": [sum(row[k] for row in confusion) for k in range(size)],
        "correct": [5] * size, "confusion": confusion,
    }  # fmt: skip


def checkpoint(time: float, number: int) -> Record:
    return {
        "kind": "checkpoint", "time": time, "step": number, "digest": "d" * 64, "seal": "", "bytes": 1000,
        "stall_ms": 500.0, "durable_ms": 900.0,
    }  # fmt: skip


def end(time: float, steps: int, status: str = "completed", **others: Any) -> Record:
    return {
        "kind": "end", "time": time, "status": status, "steps": steps, "samples": 10 * steps, "seconds": 9.0,
        "top1": 0.5, "loss": 0.7, "ledger_sha256": "a" * 64, "weights_sha256": "b" * 64, "processes": 2, "skipped": 0,
        "peak_memory_gib": [0.5, 0.5], **others,
    }  # fmt: skip


def eventful() -> list[Record]:
    """Two processes; killed at step 4 of 5 an epoch; one process; a hang; two again, to the end at step 10."""
    hang = {"kind": "fault", "time": 1021.0, "fault": "hang", "step": 6, "ranks": [1], "cause": "rank 1 is silent"}
    return [
        run(1000.0, 2),
        step(1001.0, 2),
        checkpoint(1001.5, 2),
        step(1002.0, 4),
        run(1010.0, 1, resumed_from=2),
        step(1011.0, 4, loss=2.0),
        step(1012.0, 5, loss=3.0),
        evaluation(1014.0, 5, 0),
        step(1015.0, 6, 1),
        hang,
        end(1021.5, 6, "failed", error="no progress"),
        run(1030.0, 2, resumed_from=6),
        step(1031.0, 10, 1),
        evaluation(1032.0, 10, 1, top1=0.75),
        classes(1032.0, 10),
        end(1033.0, 10),
    ]


def leave(folder: Path, records: Iterable[Any], recipe_name: str = "digits", **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "journal.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(json.dumps(recipe(recipe_name).to_dict() | config))
    return folder
