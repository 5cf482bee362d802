"""`lockstep train`: train by a recipe."""

import os
import time
from functools import partial
from pathlib import Path

from lockstep.commands.shared.arguments import launched, planned
from lockstep.config import Config, Execution
from lockstep.config.recipes import RECIPES
from lockstep.distributed.output import status


def main(args: list[str]) -> int:
    """Train by a recipe."""
    about = (
        f"Train by the recipe {{}} (of {', '.join(RECIPES)}, or package.module:function). "
        "--batch-size is global: it is shared out over all processes."
    )
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
    from lockstep.training.run_folder import check, claim_folder, discarded_if_unused, run

    check(config)
    began = time.monotonic()
    if launcher_ranks():
        return launched(run, config, "", execution=execution)
    config.require_batch_for(process_count(execution) * execution.nnodes)
    if execution.node_rank > 0:
        return launched(run, config, "", execution=execution)
    folder = claim_folder(config)
    with sigterm_raises(), hold(folder), discarded_if_unused(folder):
        remove_states(mine=False)
        from lockstep.training import loop  # noqa: F401 (once here, and not once in each worker: they are forked)

        status("starting")
        how = {"execution": execution, "recovery": config.recovery, "restarting": partial(_note_restart, folder)}
        return launched(run, config, str(folder), began, **how)


def _note_restart(folder: Path, cause: str, processes: int) -> None:
    """Put into the run's journal that its processes are started again, where it has one yet."""
    from lockstep.monitoring.journal import FaultRecord, append
    from lockstep.training.run_folder import newest_step

    journal, step = folder / "journal.jsonl", max(0, newest_step(str(folder)))
    if journal.exists():
        append(journal, FaultRecord(kind="fault", fault="restart", step=step, cause=cause, processes=processes))
