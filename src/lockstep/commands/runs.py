"""The commands that make, evaluate and hand on a run: each takes its words, and returns the exit code.

torch is imported only where a command needs it, so that help answers at once.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config import Config, Execution
from lockstep.config.flags import as_command, sort_words
from lockstep.config.recipes import RECIPES, recipe
from lockstep.errors import UserError


def train(args: list[str]) -> int:
    """Train by a recipe."""
    names, rest = sort_words(args, Config)
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
        return _launch(run, config, "", execution=execution)
    config.require_batch_for(processes(execution) * execution.nnodes)
    if execution.node_rank > 0:
        return _launch(run, config, "", execution=execution)
    folder = claim_folder(config)
    try:
        reached = partial(position, str(folder))
        return _launch(run, config, str(folder), execution=execution, recovery=config.recovery, position=reached)
    finally:
        discard_folder(folder)


def _launch(fn: Callable[..., Any], *args: Any, **how: Any) -> int:
    """Run `fn` on the run's processes; returns the exit code: 128 and the signal where one stopped them."""
    from lockstep.processes.launcher import launch

    stopped = max(value or 0 for value in launch(fn, *args, **how))
    return 128 + stopped if stopped else 0


def evaluate(args: list[str]) -> int:
    """Evaluate a run's saved weights again."""
    from lockstep.training.folder import Evaluation, evaluate_run, read_config

    names, rest = sort_words(args, Evaluation)
    run_folder = one_name("eval", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("eval needs a run folder", "As `lockstep eval runs/digits-20260101-120000`.")
    config = read_config(run_folder) if run_folder else Config()
    default = Evaluation(execution=dataclasses.replace(Execution(), data_dir=config.execution.data_dir))
    chosen: Evaluation = parse(
        Evaluation, default, rest, "lockstep eval RUN", "Evaluate a run's saved weights, on any number of processes."
    )
    return _launch(evaluate_run, config, run_folder, chosen, execution=chosen.execution)


def export(args: list[str]) -> int:
    """Write a run's weights for other programs."""
    from lockstep.checkpoint.foreign import Export, export

    names, rest = sort_words(args, Export)
    run_folder = one_name("export", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("export needs a run folder", "As `lockstep export runs/digits-20260101-120000`.")
    chosen: Export = parse(
        Export, Export(), rest, "lockstep export RUN", "Write a run's weights as one file for other programs."
    )
    print(export(run_folder, chosen))
    return 0


def recipes(args: list[str]) -> int:
    """List the recipes."""
    if args:
        raise UserError(f"recipes takes no arguments, got {' '.join(args)}", "`lockstep show RECIPE` prints one.")
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').splitlines()[0]}")
    return 0


def show(args: list[str]) -> int:
    """Print a recipe as a command."""
    if len(args) > 1:
        raise UserError(f"show takes one recipe, got {' '.join(args)}", "As `lockstep show mnist`.")
    name = args[0] if args else "digits"
    config = recipe(name)
    for line in ((RECIPES[name].__doc__ or "") if name in RECIPES else name).strip().splitlines():
        print(f"# {line.strip()}".rstrip())
    print(as_command(f"lockstep train {name}", config))
    return 0
