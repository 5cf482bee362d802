"""`lockstep compare`: each strategy on each number of processes, in turns, under equal conditions."""

import importlib.util
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.commands.compare import cells as measuring
from lockstep.commands.compare.cells import NotMeasured
from lockstep.commands.compare.folder import claim, write
from lockstep.commands.compare.plan import Cell, Plan
from lockstep.commands.compare.results import Row, aggregate, environment
from lockstep.commands.compare.strategies import Strategy
from lockstep.commands.shared.arguments import train_arguments
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.devices import devices, processes
from lockstep.processes.proc import cores
from lockstep.processes.signals import ended_by_sigterm
from lockstep.processes.world import joined
from lockstep.training.folder import check

Say = Callable[[str], None]
Measure = Callable[[Config, Path], dict[str, Any]]  # cells.run, or what stands in for it


def compare(plan: Plan, log: Say, measure: Measure = measuring.run) -> dict[str, Any]:
    """Run what is missing of the comparison, write everything into its folder, and return what results.json holds.

    Raises:
        UserError: for a config that can't run at all, a folder of another comparison, an unknown baseline.
        KeyboardInterrupt: on Ctrl-C; finished cells stay.
    """
    if joined():
        raise UserError(
            "compare starts its own processes, and a launcher has started this one",
            "Run it without torchrun or mpirun.",
        )
    alone = plan.config_for(Cell(Strategy(), 1), cores())
    check(alone)
    available = devices(alone.execution)
    gpus = 0 if available[0].type == "cpu" else len(available)
    table = plan.cells(processes(replace(alone.execution, nproc="auto")))
    rows = {cell: _row(plan, cell, gpus) for cell in table}
    base = plan.baseline_of(table, [cell for cell, row in rows.items() if not row.not_measured])
    place = environment(cores(), available[0].type, gpus)
    folder = claim(plan, place)
    try:
        with ended_by_sigterm():
            _rounds(plan, rows, folder, log, measure)
    except (KeyboardInterrupt, SystemExit):
        log(f"stopped; the same command with --out {shlex.quote(str(folder))} goes on with what is missing")
        raise
    names = {result["device"] for row in rows.values() for result in row.rounds.values()}
    results = {
        "config": plan.config.to_dict(),
        "repeats": plan.repeats,
        "threads_each": plan.config.execution.threads,
        "environment": place | ({"device": " and ".join(sorted(names))} if gpus and names else {}),
        **aggregate(list(rows.values()), base.name),
    }
    written = write(results, folder)
    if importlib.util.find_spec("matplotlib") is None:
        log("no picture: it needs matplotlib (pip install 'lockstep-torch[compare]', then this again with its --out)")
    log(f"{', '.join(written)} in {folder}")
    return results


def _row(plan: Plan, cell: Cell, gpus: int) -> Row:
    """A row, with the reason where it is known before anything starts that it can't be measured here."""
    strategy = cell.strategy
    drives = gpus if strategy.base == "dp" and gpus else cell.processes
    row = Row(cell.name, strategy.name, cell.processes, drives)
    try:
        config = plan.config_for(cell, cores())
        row.threads, row.workers = config.execution.threads, config.execution.workers
        row.command = shlex.join(["lockstep", *train_arguments(config)])
        check(config)
        config.require_batch_for(processes(config.execution))
    except UserError as error:
        row.not_measured = error.message
        return row
    if 0 < gpus < cell.processes:
        row.not_measured = f"{cell.processes} processes would share {gpus} GPU(s)"
    if not gpus:
        if cell.processes * row.threads > cores():
            what = f"{cell.processes} processes" + (f" of {row.threads} threads" if row.threads > 1 else "")
            row.not_measured = f"{what} on {cores()} CPU cores would measure how they get in each other's way"
        elif config.precision == "fp16":
            row.not_measured = "fp16 on a CPU says nothing about fp16 on a GPU"
    return row


def _rounds(plan: Plan, rows: Mapping[Cell, Row], folder: Path, log: Say, measure: Measure) -> None:
    """Each round runs every row once, every other round backwards, so that a drift of the machine meets all alike."""
    total = sum(not row.not_measured for row in rows.values()) * plan.repeats
    clock = _Clock(total)
    for number in range(1, plan.repeats + 1):
        turn = list(rows.items()) if number % 2 else list(rows.items())[::-1]
        for cell, row in turn:
            if row.not_measured:
                continue
            place = folder / "cells" / f"{cell.folder}-r{number}"
            done = (place / "result.json").exists()
            log(f"{clock.place()}: {cell.name}, round {number} of {plan.repeats}" + (", is there" if done else ""))
            try:
                row.rounds[number] = measure(plan.config_for(cell, cores()), place)
            except NotMeasured as error:
                row.not_measured = str(error)
                log(f"{cell.name} can't be measured: {error}")
            clock.passed(measured=not done, left_out=plan.repeats - number if row.not_measured else 0)


class _Clock:
    """How far the comparison is, and how long the rest takes if it goes on as before."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.measured, self.last = 0.0, self.began  # cells run now; when the last one ended
        self.spent = 0.0

    def passed(self, measured: bool, left_out: int = 0) -> None:
        """A cell is done; `left_out` others of its row will not be tried."""
        now = time.monotonic()
        if measured:
            self.measured, self.spent = self.measured + 1, self.spent + now - self.last
        self.done, self.total, self.last = self.done + 1, self.total - left_out, now

    def place(self) -> str:
        """`cell 3 of 12 (1 min 20 s so far, about 4 min left)`."""
        place = f"cell {self.done + 1} of {self.total}"
        if not self.measured:
            return place
        left = self.spent / self.measured * (self.total - self.done)
        return f"{place} ({_duration(time.monotonic() - self.began)} so far, about {_duration(left)} left)"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
