"""`lockstep forecast` against real runs: N = 2, one thread each, over the loopback and over links of known rates.

    python benchmarks/forecast.py [--links loopback,1gbit,100mbit] [--recipes mnist,cifar10] [--rounds 1]

The limited links are a pair of virtual Ethernet devices between two network namespaces, both ends behind a token
bucket: that needs root, `ip` and `tc`, and is left out, with the reason, where they are missing. In each case `lockstep
forecast` measures in the two namespaces what it needs (with --nnodes 2), and then `lockstep train` runs in them. Prints
forecast and measured step times side by side and puts them into benchmarks/results/forecast.json, in the place of the
same cases. Namespaces and processes are gone afterwards, also after Ctrl-C.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, print_table, table, write
from namespaces import Host, missing, two_hosts

BATCHES = {"mnist": 200, "cifar10": 64, "digits": 64}
LINKS = {"loopback": None, "1gbit": 1000, "100mbit": 100}  # Mbit/s
AIM = 0.15
_STEPS = {"mnist": 60, "cifar10": 15, "digits": 60}  # of the real run, after the first record
_EVERY = 5  # steps in a record of the journal
_PATIENCE_S = 240.0  # for one command
_GRACE_S = 15.0


@dataclass(frozen=True)
class Place:
    """Where one of a run's commands goes: a host at a link, or this machine itself."""

    host: Host | None = None
    flags: tuple[str, ...] = ()

    @property
    def prefix(self) -> tuple[str, ...]:
        return self.host.prefix if self.host else ()


@contextmanager
def places(mbit: float | None) -> Iterator[list[Place]]:
    """Two hosts with a link of this rate between them; None: this machine."""
    if mbit is None:
        yield [Place()]
        return
    with two_hosts(mbit) as link:
        master = ("--nnodes", "2", "--master-addr", link.hosts[0].address, "--master-port", "29577")
        yield [Place(host, (*master, "--node-rank", str(rank))) for rank, host in enumerate(link.hosts)]


class Commands:
    """One command at each place; all are ended on leaving."""

    def __init__(self, where: Sequence[Place], *arguments: str) -> None:
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "lockstep", *arguments]
        self.started = [
            subprocess.Popen(
                [*place.prefix, *command, *place.flags],
                stdout=self.output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for place in where
        ]

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self.running and time.monotonic() < deadline:
            time.sleep(0.1)
        self.stop(signal.SIGKILL)
        self.output.close()

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.started)

    def stop(self, number: signal.Signals) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, number)

    def wait(self) -> None:
        """Until all have ended; a failure is an error."""
        deadline = time.monotonic() + _PATIENCE_S
        for process in self.started:
            if process.wait(max(0.1, deadline - time.monotonic())):
                raise RuntimeError(f"exit code {process.returncode}: {self.printed()}")

    def printed(self) -> str:
        self.output.seek(0)
        return self.output.read()[-3000:]


def forecast(where: Sequence[Place], recipe: str, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """The report of `lockstep forecast`, as JSON."""
    out = folder / "forecast.json"
    arguments = ["forecast", recipe, *flags, "--out", str(out), "--nproc", "1,2"]
    with Commands(where, *arguments) as commands:
        commands.wait()
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def measured(where: Sequence[Place], recipe: str, flags: Sequence[str], folder: Path) -> list[float]:
    """Milliseconds of a step in each record of a real run's journal but the first."""
    nproc = str(2 // len(where))
    records = 1 + _STEPS[recipe] // _EVERY
    out = folder / "run"
    arguments = ["train", recipe, *flags, "--nproc", nproc, "--out", str(out), "--log-every", str(_EVERY)]
    found: list[float] = []
    with Commands(where, *arguments, "--checkpoint-every", "0") as commands:
        deadline = time.monotonic() + _PATIENCE_S
        while len(found) < records:
            if time.monotonic() > deadline or not commands.running:
                raise RuntimeError(f"the run got as far as {len(found)} records: {commands.printed()}")
            time.sleep(0.5)
            found = _steps(out / "journal.jsonl", BATCHES[recipe])
    shutil.rmtree(out)
    return found[1:records]


def _steps(journal: Path, batch: int) -> list[float]:
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [batch / record["images_per_s"] * 1e3 for record in records if record["kind"] == "step"]


def case(link: str, recipe: str, rounds: int, data_dir: str) -> dict[str, Any]:
    """Forecast and run, in turns."""
    flags = ["--batch-size", str(BATCHES[recipe]), "--threads", "1", "--device", "cpu"]
    flags += ["--data-dir", str(Path(data_dir).absolute())] if data_dir else []
    reports, runs = [], []
    with ExitStack() as stack:
        where = stack.enter_context(places(LINKS[link]))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-forecast-")))
        for _ in range(rounds):
            reports.append(forecast(where, recipe, flags, folder))
            runs.append(measured(where, recipe, flags, folder))
    row = [report["rows"][-1] for report in reports]
    forecast_ms = statistics.median(r["step_s"] * 1e3 for r in row)
    real = statistics.median(statistics.median(run) for run in runs)
    return {
        "forecast_ms": forecast_ms,
        "measured_ms": real,
        "error": forecast_ms / real - 1,
        "forecast_rounds_ms": [r["step_s"] * 1e3 for r in row],
        "measured_rounds_ms": [statistics.median(run) for run in runs],
        "compute_ms": statistics.median(r["compute_s"] * 1e3 for r in row),
        "all_reduce_ms": statistics.median(r["all_reduce_s"] * 1e3 for r in row),
        "exposed_ms": statistics.median(r["exposed_s"] * 1e3 for r in row),
        "bottleneck": row[-1]["bottleneck"],
        "link": reports[-1]["link"],
    }


def tabled(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All cases, forecast and measured side by side."""
    columns = ["case", "forecast ms", "measured ms", "error", "compute ms", "all-reduce ms", "of it not hidden ms"]
    keys = ("forecast_ms", "measured_ms", "error", "compute_ms", "all_reduce_ms", "exposed_ms")
    cells = [
        [name, *(f"{row[key]:+.1%}" if key == "error" else f"{row[key]:.1f}" for key in keys)]
        for name, row in rows.items()
    ]
    notes = [
        "N = 2 processes of one thread; a step's median time. Links of 1 Gbit/s and 100 Mbit/s stand between two "
        "network namespaces, limited at both ends."
    ]
    return table("`lockstep forecast` and real runs", columns, cells, notes)


def describe(row: dict[str, Any]) -> str:
    """A case in one line."""
    parts = f"compute {row['compute_ms']:.1f}, all-reduce {row['all_reduce_ms']:.1f}, exposed {row['exposed_ms']:.1f}"
    sides = f"forecast {row['forecast_ms']:8.1f} ms   measured {row['measured_ms']:8.1f} ms"
    return f"{sides}   error {row['error']:+6.1%}   ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--recipes", default="mnist,cifar10")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--json", default="", help="write here instead, without the environment")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is open is closed
    lacking, kept = missing(), RESULTS / "forecast.json"
    rows = json.loads(kept.read_text(encoding="utf-8"))["rows"] if kept.exists() and not args.json else {}
    for link in args.links.split(","):
        if LINKS[link] and lacking:
            print(f"{link}: not measured: {lacking}")
            continue
        for recipe in args.recipes.split(","):
            row = rows[f"{recipe}, batch {BATCHES[recipe]}, {link}"] = case(link, recipe, args.rounds, args.data_dir)
            print(f"{recipe:8} {link:9} {describe(row)}", flush=True)
    within = sum(abs(row["error"]) <= AIM for row in rows.values())
    print(f"{within} of {len(rows)} within {AIM:.0%}")
    summary = tabled(rows)
    print_table(summary)
    result = {"processes": 2, "threads": 1, "rounds": args.rounds, "aim": AIM, "rows": rows, "tables": [summary]}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    else:
        write("forecast", result)


if __name__ == "__main__":
    main()
