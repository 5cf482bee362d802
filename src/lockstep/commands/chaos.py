"""`lockstep chaos`: kill a training at random moments, let it recover, and compare it with an undisturbed one."""

import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.commands.shared.arguments import planned, print_error
from lockstep.commands.shared.attempt import Attempt, Lost, stepped
from lockstep.config import Config
from lockstep.errors import EXIT_FAILURE, UserError
from lockstep.watch.journal import EndRecord, end_of, read


@dataclass(frozen=True)
class Plan:
    """What to break, and how often."""

    kills: int = 20
    """Faults to inject."""
    chaos_seed: int = 0
    """Seed of the moments and the victims."""
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        if self.kills < 1:
            raise UserError(f"--kills {self.kills} breaks nothing", "Use 1 or more.")
        if self.config.execution.nnodes > 1:
            raise UserError("chaos with --nnodes", "It kills processes of this machine alone: leave the flag out.")
        if self.config.recovery.checkpoint_every in ("0", "never"):
            raise UserError("chaos without checkpoints", "Nothing could be recovered: leave --checkpoint-every 0 out.")


@dataclass(frozen=True)
class Fault:
    """One injected fault and what became of it. Times in seconds from the kill, on one clock."""

    what: str  # "rank 1 of 3" or "launcher of 3"
    moment: str
    detected_s: float  # all processes of that attempt gone, or the launcher's word
    started_s: float  # the new attempt has imported torch and assembled the run
    recovered_s: float  # it has taken a step that counts
    repeated: int  # steps taken again
    processes: int  # of the new attempt


@dataclass
class Report:
    """All faults, and the digests of all runs."""

    faults: list[Fault] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    ledgers: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)
    runs: int = 0
    exact: bool = False

    @property
    def holds(self) -> bool:
        """True where every run came back with the same ledger and, in exact mode, the same weights."""
        return not self.lost and len(self.ledgers) == 1 and (not self.exact or len(self.weights) == 1)


def chaos(plan: Plan, log: Callable[[str], None]) -> Report:
    """Run the plan; the undisturbed run comes first."""
    draw = random.Random(plan.chaos_seed)
    report = Report(exact=bool(plan.config.exact))
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        base = _prepared(plan.config)
        calm = Attempt(base, Path(folder, "calm"), log)
        calm.finish()
        end = _compare(report, calm.folder)
        log(f"undisturbed: {end['steps']} steps, ledger {end['ledger_sha256'][:12]}")
        while len(report.faults) + len(report.lost) < plan.kills:
            _disturbed_run(plan, base, Path(folder, f"run-{report.runs}"), draw, report, log)
            report.runs += 1
    return report


def _prepared(config: Config) -> Config:
    """The config with what chaos needs: every step in the journal, restarts without end, its own folders."""
    from lockstep.processes.devices import processes

    count = processes(config.execution)
    recovery = replace(config.recovery, max_restarts=10_000)
    return replace(config, recovery=recovery).with_execution(nproc=count, log_every=1, out="")


def _disturbed_run(
    plan: Plan, base: Config, folder: Path, draw: random.Random, report: Report, log: Callable[[str], None]
) -> None:
    most = int(base.execution.nproc)
    attempt = Attempt(base, folder, log)
    try:
        while len(report.faults) < plan.kills:
            if not attempt.wait_for_step():
                break  # it is complete
            struck = _strike(attempt, base, folder, draw, most, log)
            if struck is None:
                break
            fault, attempt = struck
            report.faults.append(fault)
            number = f"{len(report.faults)}/{plan.kills}"
            log(f"{number}: {fault.what} killed {fault.moment}; back after {fault.recovered_s:.1f} s")
        attempt.finish()
        _compare(report, folder)
    except Lost as lost:
        report.lost.append(f"{folder.name}: {lost}")
    finally:
        attempt.kill_all()
        shutil.rmtree(folder, ignore_errors=True)


def _compare(report: Report, folder: Path) -> EndRecord:
    end = end_of(read(folder / "journal.jsonl"))
    if end is None or end["status"] != "completed":
        raise Lost(f"the run did not complete: {end}")
    report.ledgers.add(end["ledger_sha256"])
    report.weights.add(end["weights_sha256"])
    return end


def _strike(
    attempt: Attempt, base: Config, folder: Path, draw: random.Random, most: int, log: Callable[[str], None]
) -> tuple[Fault, Attempt] | None:
    """Kill one process at a random moment and wait for the recovery; None where the run was complete before."""
    while_writing = draw.random() < 0.4
    if not attempt.wait_for_moment(draw, while_writing):
        return None
    records = attempt.journal()
    pids = attempt.pids()
    victim = draw.randrange(-1, len(pids)) if len(pids) > 1 else -1
    steps = max((r["step"] for r in records if r["kind"] == "step"), default=0)
    runs = sum(r["kind"] == "run" for r in records)
    writing = attempt.writing()
    moment = "while a checkpoint was written" if writing else f"at step {steps}"
    began = time.monotonic()
    os.kill(attempt.process.pid if victim < 0 else pids[victim], signal.SIGKILL)
    if victim < 0:
        attempt.process.wait()
        attempt.wait_until_gone(pids)
        detected = time.monotonic() - began
        count = draw.randint(1, most)
        attempt = Attempt(base.with_execution(nproc=count), folder, log)
    else:
        attempt.wait_until_gone(pids)
        detected = time.monotonic() - began
    started = attempt.wait_for(lambda new: sum(r["kind"] == "run" for r in new) > runs, "a new start") - began
    run = [r for r in attempt.journal() if r["kind"] == "run"][-1]
    recovered = attempt.wait_for(lambda new: stepped(new, runs + 1), "a step") - began
    what = f"{'launcher' if victim < 0 else f'rank {victim}'} of {len(pids)}"
    repeated = max(0, steps - run["resumed_from"])
    return Fault(what, moment, detected, started, recovered, repeated, len(run["pids"])), attempt


def main(args: list[str]) -> int:
    """Kill a training at random, and compare what comes back."""

    def often(config: Config) -> Plan:
        return Plan(config=replace(config, recovery=replace(config.recovery, checkpoint_every="10steps")))

    about = (
        "Train by the recipe `{}` while killing processes and the launcher at random moments, let it recover, and "
        "compare ledger and (with --exact) weights with an undisturbed run. Exit code 0: all came back the same."
    )
    plan: Plan = planned("chaos", Plan, often, args, about)
    show(report := chaos(plan, log=print_error))
    return 0 if report.holds else EXIT_FAILURE


def show(report: Report) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("fault", "moment", "gone s", "started s", "recovered s", "steps repeated", "goes on with")
    for f in report.faults:
        numbers = [f"{x:.2f}" for x in (f.detected_s, f.started_s, f.recovered_s)]
        table.add_row(f"{f.what} killed", f.moment, *numbers, str(f.repeated), f"{f.processes} process(es)")
    console.print(table)
    if report.faults:
        middle: dict[str, Any] = {
            "gone": statistics.median(f.detected_s for f in report.faults),
            "importing and assembling": statistics.median(f.started_s - f.detected_s for f in report.faults),
            "first step": statistics.median(f.recovered_s - f.started_s for f in report.faults),
            "in all": statistics.median(f.recovered_s for f in report.faults),
        }
        console.print("median seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in middle.items()))
    total = len(report.faults) + len(report.lost)
    console.print(
        f"{len(report.faults)} of {total} faults recovered in {report.runs} run(s); "
        f"{len(report.ledgers)} ledger digest(s), {len(report.weights)} weights digest(s)"
        + ("" if report.exact else " (only exact mode, --exact, promises one)")
    )
    for text in (*report.lost, *sorted(report.ledgers), *(sorted(report.weights) if report.exact else ())):
        console.print(text, soft_wrap=True)
