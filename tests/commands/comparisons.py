"""Made journals and results, for the tests of compare."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.commands.compare.cells import measure
from lockstep.commands.compare.results import Row, aggregate
from lockstep.config import Config

LEDGER = "5a63b02a" * 8


def journal(
    seconds: Sequence[float],
    *,
    epochs: int = 1,
    steps: int = 10,
    batch: int = 64,
    data_wait_ms: float = 1.0,
    comm_wait_ms: float | None = 2.0,
    ledger: str = LEDGER,
    status: str = "completed",
    memory: Sequence[float] = (0.5, 0.75),
) -> list[Any]:
    """A run whose log windows of `steps` steps took so many seconds each."""
    per_epoch = len(seconds) // epochs
    records: list[dict[str, Any]] = [{"kind": "run", "devices": ["cpu (AVX2)"]}]
    for number, took in enumerate(seconds, 1):
        record = {"kind": "step", "step": number * steps, "samples": number * steps * batch}
        record["epoch"] = min(epochs, 1 + (number - 1) // per_epoch) - 1
        record |= {"images_per_s": steps * batch / took, "data_wait_ms": data_wait_ms, "comm_wait_ms": comm_wait_ms}
        records.append(record)
        if number % per_epoch == 0:
            records.append({"kind": "eval"})
    total = len(seconds) * steps
    end = {"kind": "end", "status": status, "steps": total, "samples": total * batch, "seconds": sum(seconds) + 0.5}
    return [*records, end | {"top1": 0.875, "ledger_sha256": ledger, "peak_memory_gib": [*memory]}]


def result(step_s: float, **more: Any) -> dict[str, Any]:
    """What a run of 10 windows measured, each step of which took so long."""
    return measure(journal([10 * step_s] * 10, **more))


def row(name: str, rounds: Mapping[int, Mapping[str, Any]], not_measured: str = "") -> Row:
    strategy, _, count = name.rpartition(" x")
    command = f"lockstep train digits --strategy ddp --nproc {count}"
    return Row(name, strategy, int(count), int(count), 1, 0, command, not_measured, dict(rounds))


def results(rows: Sequence[Row], baseline: str = "single x1", repeats: int = 3) -> dict[str, Any]:
    """As results.json holds them."""
    place = {"cpu": "a processor", "cores": 4, "device": "cpu", "devices": 0, "torch": "2.11.0"}
    config = dataclasses.asdict(Config(epochs=20))
    return {"config": config, "repeats": repeats, "threads_each": 0, "environment": place} | aggregate(rows, baseline)


def example() -> dict[str, Any]:
    """Five rows of three rounds, one of them not measured."""

    def rounds(step_s: float, drift: float = 0.02) -> dict[int, dict[str, Any]]:
        return {k: result(step_s * (1 + drift * (k - 2))) for k in (1, 2, 3)}

    return results(
        [
            row("single x1", rounds(0.02)),
            row("ddp x1", rounds(0.0204, 0.04)),
            row("ddp x2", rounds(0.0113, -0.05)),
            row("ddp x4", rounds(0.0066, 0.06)),
            row("ddp+syncbn x1", rounds(0.0211)),
            row("ddp+syncbn x2", rounds(0.0127, 0.05)),
            row("ddp+syncbn x4", rounds(0.0078)),
            row("dp x1", {}, "--strategy dp needs two GPUs or more, & here is <none>"),
        ]
    )
