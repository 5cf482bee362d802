"""`lockstep train`: train by a recipe."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from lockstep.commands.shared.arguments import launched, planned
from lockstep.config import Config, Execution
from lockstep.config.recipes import RECIPES
from lockstep.distributed.output import status
from lockstep.distributed.signals import again


def main(args: list[str]) -> int:
    """Train by a recipe."""
    about = (
        f"Train by the recipe {{}} (of {', '.join(RECIPES)}, or package.module:function). "
        "--batch-size is global: it is shared out over all processes."
    )
    again.listen()
    config: Config = planned("train", lambda config: config, args, about)
    if os.environ.get("RANK", "0") == "0":
        status("starting: importing torch")
    from lockstep.distributed.environment import over_slurm_nodes
    from lockstep.distributed.rendezvous import refusing_for_all

    execution = over_slurm_nodes(config.execution)
    with refusing_for_all(execution):
        return _start(config, execution)


def _start(config: Config, execution: Execution) -> int:
    from lockstep.distributed.devices import process_count
    from lockstep.distributed.environment import launcher_ranks
    from lockstep.distributed.files import hold
    from lockstep.distributed.resize import remove_states
    from lockstep.distributed.signals import sigterm_raises
    from lockstep.training.run_folder import check, claim_folder, discarded_if_unused, newest_step, run

    check(config)
    began = time.monotonic()
    if launcher_ranks():
        return launched(run, config, "", execution=execution)
    if bounds := execution.nproc_range:
        execution = replace(execution, nproc=f"{bounds[0]}:{min(bounds[1], config.most_processes)}")
    else:
        config.require_batch_for(process_count(execution) * execution.nnodes)
    if execution.node_rank > 0:
        return launched(run, config, "", execution=execution)
    folder = claim_folder(config)
    with sigterm_raises(), hold(folder), discarded_if_unused(folder):
        remove_states(mine=False)
        from lockstep.training import loop  # noqa: F401 (once here, and not once in each worker: they are forked)

        status("starting")
        reached = partial(newest_step, str(folder))
        noted = partial(_note_restart, folder, reached)
        how = {"execution": execution, "recovery": config.recovery, "progress": reached, "restarting": noted}
        return launched(run, config, str(folder), began, **how)


def _note_restart(folder: Path, newest_step: Callable[[], int], cause: str, processes: int) -> None:
    """Put into the run's journal that its processes are started again, where it has one yet."""
    from lockstep.monitoring.journal import FaultRecord, append

    journal, step = folder / "journal.jsonl", max(0, newest_step())
    if journal.exists():
        append(journal, FaultRecord(kind="fault", fault="restart", step=step, cause=cause, processes=processes))
