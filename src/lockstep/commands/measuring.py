"""What compare, tune, sweep and forecast share: rows measured in turns, folders that go on, statistics, tables."""

import contextlib
import csv
import io
import itertools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lockstep.commands.shared.arguments import start_training
from lockstep.commands.shared.grid import Column, fitted, terminal_width
from lockstep.config import Config, Execution
from lockstep.config.fields import diff_configs, flattened, require
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.files import write_error, write_json, write_text
from lockstep.distributed.signals import sigterm_raises
from lockstep.errors import cell
from lockstep.monitoring.journal import Record, end_of, read

if TYPE_CHECKING:
    from lockstep.distributed.world import World
    from lockstep.training.assemble import Run
    from lockstep.training.losses import RankLoss

Log = Callable[[str], None]
Figure = dict[str, float | None]  # a median or mean, and its interval: low and high
AGAIN = "the machine was busy with something else, so measure again"
_BUSY = 0.25  # cores kept by other programs; less than that is the kernel's own threads and the clock's ticks
_MOST_GAIN = 1.3  # times the ratio of the devices: caches make a little more than the ideal possible
_RESAMPLES = 10_000
_WARM_UP = 3  # steps; DDP arranges its buckets after the first
_FEWEST, _MOST = 3, 2000  # steps that are timed
_END_S = 30.0  # that a run gets to end after a signal

# the 97.5 % quantiles of Student's t distribution by degrees of freedom, 1 to 30; beyond them the normal's is near
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class NotMeasured(Exception):
    """A row can't be measured; the message says why."""


@dataclass
class Row:
    """A row of a table: one way to train, and what each round measured of it."""

    name: str
    config: Config
    failed: str  # why it has no figures
    rounds: dict[int, Mapping[str, Any]]


def run_rounds(rows: Sequence[Row], rounds: int, measure: Callable[[Row, int], Mapping[str, Any]], log: Log) -> None:
    """Measure every row once a round, every other round backwards: so a drift of the machine meets all rows alike.

    A row that can't be measured keeps the reason and is left out from then on.
    """
    for number in range(1, rounds + 1):
        for row in (row for row in (rows if number % 2 else rows[::-1]) if not row.failed):
            log(f"round {number} of {rounds}: {row.name or 'as it is'}")
            try:
                row.rounds[number] = measure(row, number)
            except (NotMeasured, WorkerFailed) as error:
                row.failed = str(error)
                log(f"{row.name} can't be measured: {error}")


def require_one_machine(command: str, config: Config) -> None:
    """Raise UserError for --nnodes."""
    several = config.execution.nnodes > 1
    require(not several, f"{command} with --nnodes", "It starts the processes of one machine: leave the flag out.")


def claim(command: str, config: Config, place: Mapping[str, Any]) -> Path:
    """Make the folder of a comparison or a sweep, or go on in one that was made under the same conditions.

    `place` is what has to be the same beside the config. Raises UserError where it is not, naming what differs, and
    for a folder that holds something else or can't be written.
    """
    usual = f"runs/{command}-{config.recipe.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, remedy = Path(config.execution.out or usual), "Name another folder with --out."
    file, own = folder / f"{command}.json", {"config": config.to_dict(), **place}
    try:
        if file.exists():
            there = json.loads(file.read_text(encoding="utf-8"))
            different = diff_configs(there, own, ignore=("out", "config.recovery", "recipe"))
            message = f"{folder} was made by `lockstep {command}` under other conditions (there -> now):"
            require(not different, "\n    ".join([message, *different]), remedy)
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        require(not any(folder.iterdir()), f"{folder} is not empty and was not made by `lockstep {command}`", remedy)
        write_json(file, own)
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


def write_results(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json, and its rows as table.csv, where the parts of a figure are columns: speedup.median."""
    write_json(folder / "results.json", results)
    rows = [{k: v for k, v in flattened(row).items() if not isinstance(v, list | None)} for row in results["rows"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: cell(v) if isinstance(v, str) else v for k, v in row.items()} for row in rows)
    write_text(folder / "table.csv", out.getvalue())


@contextlib.contextmanager
def resumable(folder: Path, log: Log) -> Iterator[None]:
    """Say how to go on where the work inside is stopped by a signal, and where the results are at the end."""
    try:
        with sigterm_raises():
            yield
    except (KeyboardInterrupt, SystemExit):
        log(f"stopped; the same command with --out {shlex.quote(str(folder))} goes on with what is missing")
        raise
    log(f"results.json, table.csv and the runs are in {folder}")


def train_in(folder: Path, config: Config) -> list[Record]:
    """Run `lockstep train` in a folder, unless a completed run is there, and return its journal.

    A run that did not end goes on where it was, or, with --resume never, begins again. What it prints is in output.txt.
    Raises NotMeasured with the command's own message.
    """
    journal, output = folder / "journal.jsonl", folder / "output.txt"
    records = read(journal) if journal.exists() else []
    if not _completed(records):
        if config.recovery.resume == "never":
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        code = _wait(start_training(config.with_execution(out=str(folder)), output))
        if code or not _completed(records := read(journal)):
            text = output.read_text(encoding="utf-8", errors="replace")
            raise NotMeasured(printed_error(text) if code else "the run did not complete")
    return records


def _completed(records: Sequence[Record]) -> bool:
    end = end_of(records)
    return end is not None and end["status"] == "completed"


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; where this process is stopped, the other one ends first."""
    try:
        return process.wait()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # a terminal's Ctrl-C has reached the command as well
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()  # does nothing where it has ended
        process.wait()
        raise


def printed_error(output: str) -> str:
    """The first line of the last message that a command printed as its own: `lockstep: MESSAGE`."""
    rest = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line.removeprefix("lockstep: ") for line in rest if line.startswith("lockstep: ")]
    return (lines or rest or ["it printed nothing"])[-1]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median (percentiles of the medians of resamples; Efron 1979)."""
    import numpy as np

    medians = np.median(np.random.default_rng(0).choice(values, (_RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def median_of(values: Sequence[float | None]) -> Figure | None:
    """Median with its interval: none from a single value. None where a round lacks the figure."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    low, high = interval(known) if len(known) > 1 else (None, None)
    return {"median": statistics.median(known), "low": low, "high": high}


def mean_of(values: Sequence[float]) -> Figure | None:
    """Mean with its 95 % interval by Student's t: none from a single value. None of no values."""
    if len(values) < 2:
        return {"mean": values[0], "low": None, "high": None} if values else None
    mean, freedom = statistics.fmean(values), len(values) - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def written(found: Figure | None, places: int | None = None, percent: bool = False, sign: str = "") -> str:
    """`1.95 [1.90, 2.01]`; `1.95` where there is no interval. `places`: decimals; None: three digits in all."""
    if found is None:
        return "\N{EN DASH}"
    values = [value * (100 if percent else 1) for value in found.values() if value is not None]
    if places is None:
        places = min(5, max(0, 2 - math.floor(math.log10(values[0])))) if values[0] > 0 else 2
    middle, *ends = (f"{value:{sign},.{places}f}" for value in values)
    return middle + (" %" if percent else "") + (f" [{', '.join(ends)}]" if ends else "")


def show(columns: Sequence[Column], below: Iterable[str] = ()) -> None:
    """Print a table, intervals under their values, and lines below it. A narrow terminal gets fewer columns."""
    tall = [any(" [" in text for text in row) for row in zip(*(column.texts for column in columns), strict=True)]
    shown = []
    for column in columns:
        pairs = [[*text.replace(" [", "\n[").split("\n"), ""] for text in column.texts]
        texts = [line for pair, two in zip(pairs, tall, strict=True) for line in pair[: 1 + two]]
        shown.append(replace(column, texts=texts))
    lines, left_out = fitted(shown, terminal_width())
    print(*lines, *([f"(too narrow for {', '.join(left_out)})"] if left_out else []), "", *below, sep="\n")


def beyond(speedup: float, devices: float) -> str:
    """Why a speed-up by so many times the devices is not to be believed, or "": it is more than they can give."""
    message = f"a speed-up of {speedup:.3g} is more than its processes can give: {AGAIN}"
    return message if speedup > _MOST_GAIN * devices else ""


def busy(others_cores: float) -> str:
    """A note where other programs kept so many cores busy, or ""."""
    return f"others kept {others_cores:.1f} cores busy meanwhile: {AGAIN}" if others_cores > _BUSY else ""


def watch_others() -> Callable[[], float]:
    """Begin to watch this process's cores; the answer, asked for later, is how many of them others kept busy meanwhile.

    Others are neither this process nor its ended children. Over less than a second it says little: clocks tick.
    """
    began, busy_s, own_s = time.monotonic(), _busy_s(), sum(psutil.Process().cpu_times()[:4])

    def others() -> float:
        own = sum(psutil.Process().cpu_times()[:4]) - own_s  # user and system, of this process and its ended children
        return max(0.0, _busy_s() - busy_s - own) / max(1e-3, time.monotonic() - began)

    return others


def _busy_s() -> float:
    """Seconds that the cores of this process were not idle, since the machine started."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(psutil.cpu_count() or 1)
    each = psutil.cpu_times(percpu=True)
    return float(sum(sum(t) - t.idle - getattr(t, "iowait", 0.0) for t in (each[k] for k in mine if k < len(each))))


def on_ranks(fn: Callable[..., Any], *args: Any, execution: Execution) -> tuple[Any, float]:
    """What `fn(world, *args)` returns on rank 0 of the run's processes, and the cores that others kept busy."""
    from lockstep.distributed.launcher import launch

    others = watch_others()
    return launch(fn, *args, execution=execution)[0], others()


def endless_steps(run: "Run") -> Iterator[tuple[int, "RankLoss", float]]:
    """Of step after step, epoch after epoch: samples over all ranks, this rank's loss, seconds in the loader."""
    from lockstep.training.loop import steps
    from lockstep.training.state import State

    state, loaded, asked = State(), list[float](), time.perf_counter()
    while True:
        for _, samples, loss in steps(run, state, lambda _: loaded.append(time.perf_counter())):
            assert loss is not None, "nothing is left out"
            yield samples, loss, loaded.pop() - asked
            asked = time.perf_counter()
        state.epochs += 1


def speed(world: "World", run: "Run", seconds: float, workers: int) -> tuple[float, float]:
    """Train for so long after a warm-up, without evaluation. All ranks call it together, and get the same.

    Returns:
        Seconds for an image of the global batch, of the slowest rank; the part of them spent in the loader.
    """
    taken = endless_steps(run)

    def take(count: int) -> tuple[int, float]:
        images, losses, waits = zip(*itertools.islice(taken, count), strict=True)
        losses[-1].total()  # waits for the device
        return sum(images), sum(waits)

    take(_WARM_UP + 2 * workers)  # until the loader has found its pace
    pace, _ = timed(world, partial(take, _FEWEST))
    count = world.largest([min(_MOST, max(_FEWEST, int(seconds / pace * _FEWEST)))])[0]
    took, (images, waits) = timed(world, partial(take, count))
    return took / images, max(world.gather(waits)) / took


def timed(world: "World", work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the slowest rank, from a common start, and what the work returned."""
    import torch

    world.barrier()
    began = time.perf_counter()
    result = work()
    if world.device.type != "cpu":
        torch.accelerator.synchronize()
    return float(max(world.gather(time.perf_counter() - began))), result
