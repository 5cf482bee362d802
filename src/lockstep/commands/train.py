"""`lockstep train`: train by a recipe."""

from functools import partial

from lockstep.commands.shared.arguments import launched, planned
from lockstep.config import Config
from lockstep.config.recipes import RECIPES


def main(args: list[str]) -> int:
    """Train by a recipe."""
    about = (
        f"Train by the recipe `{{}}` (of {', '.join(RECIPES)}, or package.module:function). "
        "--batch-size is global: it is shared out over all processes."
    )
    config: Config = planned("train", Config, lambda config: config, args, about)
    from lockstep.processes.devices import processes
    from lockstep.processes.environment import spread
    from lockstep.processes.world import joined
    from lockstep.training.folder import check, claim_folder, discard_folder, position, run

    check(config)
    execution = spread(config.execution)
    if joined():
        return launched(run, config, "", execution=execution)
    config.require_batch_for(processes(execution) * execution.nnodes)
    if execution.node_rank > 0:
        return launched(run, config, "", execution=execution)
    folder = claim_folder(config)
    try:
        reached = partial(position, str(folder))
        return launched(run, config, str(folder), execution=execution, recovery=config.recovery, position=reached)
    finally:
        discard_folder(folder)
