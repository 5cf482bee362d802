"""`lockstep compare`: each strategy on each number of processes, in turns, under equal conditions."""

import importlib.util
import shlex
import statistics
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
from lockstep.commands.shared.arguments import refuse_launched, train_arguments
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.devices import devices, process_count
from lockstep.processes.proc import cores
from lockstep.processes.signals import sigterm_raises
from lockstep.training.folder import check

Log = Callable[[str], None]
Measure = Callable[[Config, Path], dict[str, Any]]  # cells.run, or what stands in for it


def compare(plan: Plan, log: Log, measure: Measure = measuring.run) -> dict[str, Any]:
    """Run what is missing of the comparison, write everything into its folder, and return what results.json holds.

    Raises:
        UserError: for a config that can't run at all, a folder of another comparison, an unknown baseline.
        KeyboardInterrupt: on Ctrl-C; finished cells stay.
    """
    refuse_launched("compare")
    alone = plan.config_for(Cell(Strategy(), 1), cores())
    check(alone)
    available = devices(alone.execution)
    gpus = 0 if available[0].type == "cpu" else len(available)
    table = plan.cells(process_count(replace(alone.execution, nproc="auto")))
    rows = {cell: _row(plan, cell, gpus) for cell in table}
    base = plan.baseline_of(table, [cell for cell, row in rows.items() if not row.not_measured])
    place = environment(cores(), available[0].type, gpus)
    folder = claim(plan, place)
    try:
        with sigterm_raises():
            _rounds(plan, rows, folder, log, measure, gpus > 0)
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
        config = plan.config_for(cell, cores(), gpus > 0)
        row.threads, row.workers = config.execution.threads, config.execution.workers
        row.command = shlex.join(["lockstep", *train_arguments(config)])
        check(config)
        config.require_batch_for(process_count(config.execution))
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


def _rounds(plan: Plan, rows: Mapping[Cell, Row], folder: Path, log: Log, measure: Measure, on_gpus: bool) -> None:
    """Each round runs every row once, every other round backwards, so that a drift of the machine meets all alike."""
    rounds = range(1, plan.repeats + 1)
    turns = [(number, cell) for number in rounds for cell in (list(rows) if number % 2 else list(rows)[::-1])]
    began, done = time.monotonic(), 0
    took: list[float] = []  # of the cells that were not there
    while turns := [turn for turn in turns if not rows[turn[1]].not_measured]:
        number, cell = turns.pop(0)
        place = folder / "cells" / f"{cell.folder}-r{number}"
        there, start = (place / "result.json").exists(), time.monotonic()
        progress = f"cell {done + 1} of {done + 1 + len(turns)}"
        if took:
            left = statistics.mean(took) * (1 + len(turns))
            progress += f" ({_duration(start - began)} so far, about {_duration(left)} left)"
        log(f"{progress}: {cell.name}, round {number} of {plan.repeats}" + (", is there" if there else ""))
        try:
            rows[cell].rounds[number] = measure(plan.config_for(cell, cores(), on_gpus), place)
        except NotMeasured as error:
            rows[cell].not_measured = str(error)
            log(f"{cell.name} can't be measured: {error}")
        took += [] if there else [time.monotonic() - start]
        done += 1


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
