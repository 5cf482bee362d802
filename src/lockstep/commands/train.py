"""`lockstep train`: train by a recipe."""

from functools import partial

from lockstep.commands.shared.arguments import launched, one_name, parse
from lockstep.config import Config
from lockstep.config.flags import split_arguments
from lockstep.config.recipes import RECIPES, recipe


def main(args: list[str]) -> int:
    """Train by a recipe."""
    names, rest = split_arguments(args, Config)
    name = one_name("train", "recipe", names) or "digits"
    config: Config = parse(
        Config,
        recipe(name),
        rest,
        f"lockstep train {name}",
        f"Train by the recipe `{name}` (of {', '.join(RECIPES)}, or package.module:function). "
        "--batch-size is global: it is shared out over all processes.",
    )
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
