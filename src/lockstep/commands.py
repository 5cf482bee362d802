"""The commands: each takes its words, and returns the exit code.

torch is imported only where a command needs it, so that help answers at once.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.config import Config, Execution
from lockstep.errors import EXIT_FAILURE, UserError, unknown
from lockstep.failures import WorkerFailed
from lockstep.flags import as_command, sort_words
from lockstep.recipes import RECIPES, recipe

_TELLING_S = 10.0  # that a silent process lives on: when one ends, torchrun ends the others, also the one that tells


def complain(message: str, once_a_host: bool = False) -> None:
    """Tell the user. `once_a_host`: all of torchrun's processes come to the same error, and one of them tells."""
    if once_a_host and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_TELLING_S)
        return
    print(f"lockstep: {message}", file=sys.stderr, flush=True)


def _one_name(command: str, what: str, names: list[str]) -> str:
    """The one word that may stand beside the flags; empty where there is none."""
    if len(names) > 1:
        raise UserError(f"{command} takes one {what}, got {' '.join(names)}", "Values follow a flag: --epochs 3.")
    return names[0] if names else ""


def _parse(cls: type, default: Any, args: list[str], prog: str, description: str) -> Any:
    import tyro
    from tyro.conf import OmitArgPrefixes, SuppressFixed

    markers = (OmitArgPrefixes, SuppressFixed)
    return tyro.cli(cls, default=default, args=args, prog=prog, description=description, config=markers)


def _planned(command: str, cls: type, of: Callable[[Config], Any], args: list[str], description: str) -> Any:
    """The plan of a command around a recipe: `of` makes one from the recipe's config, the flags change it."""
    names, rest = sort_words(args, cls)
    name = _one_name(command, "recipe", names) or "digits"
    return _parse(cls, of(recipe(name)), rest, f"lockstep {command} {name}", description.format(name))


def train(args: list[str]) -> int:
    """Train by a recipe."""
    names, rest = sort_words(args, Config)
    name = _one_name("train", "recipe", names) or "digits"
    config: Config = _parse(
        Config,
        recipe(name),
        rest,
        f"lockstep train {name}",
        f"Train by the recipe `{name}` (of {', '.join(RECIPES)}, or package.module:function). "
        "--batch-size is global: it is shared out over all processes.",
    )
    from lockstep.joining import spread
    from lockstep.launcher import processes
    from lockstep.run import check, claim_folder, discard_folder, position, run
    from lockstep.world import joined

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
    from lockstep.launcher import launch

    stopped = max(value or 0 for value in launch(fn, *args, **how))
    return 128 + stopped if stopped else 0


def tell(failed: WorkerFailed) -> int:
    """Print what a worker left of its failure; returns the exit code."""
    if failed.trace:
        print(failed.trace, file=sys.stderr)
    complain(str(failed))
    return failed.exit_code


def evaluate(args: list[str]) -> int:
    """Evaluate a run's saved weights again."""
    from lockstep.run import Evaluation, evaluate_run, read_config

    names, rest = sort_words(args, Evaluation)
    run_folder = _one_name("eval", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("eval needs a run folder", "As `lockstep eval runs/digits-20260101-120000`.")
    config = read_config(run_folder) if run_folder else Config()
    default = Evaluation(execution=dataclasses.replace(Execution(), data_dir=config.execution.data_dir))
    chosen: Evaluation = _parse(
        Evaluation, default, rest, "lockstep eval RUN", "Evaluate a run's saved weights, on any number of processes."
    )
    return _launch(evaluate_run, config, run_folder, chosen, execution=chosen.execution)


def verify(args: list[str]) -> int:
    """Compare the first steps on several numbers of processes."""
    from lockstep.tools.verify.plan import Plan

    about = (
        "Run the first steps of the recipe `{}` on several numbers of processes, compare ledger, images, losses, "
        "gradients, weights, buffers and evaluation, and name what makes them differ. Exit code 0: the mode's claim "
        "holds (--shards: the same bits; else: the same but for rounding), 1: it does not. --out DIR keeps the traces."
    )
    plan: Plan = _planned("verify", Plan, Plan.of, args, about)
    from lockstep.tools.verify.run import verify
    from lockstep.tools.verify.verdict import show

    show(report := verify(plan, say=complain))
    return 0 if report.holds else EXIT_FAILURE


def chaos(args: list[str]) -> int:
    """Kill a training at random, and compare what comes back."""
    from lockstep.tools.chaos import Plan, chaos, show

    def often(config: Config) -> Plan:
        recovery = dataclasses.replace(config.recovery, checkpoint_every="10steps")
        return Plan(config=dataclasses.replace(config, recovery=recovery))

    about = (
        "Train by the recipe `{}` while killing processes and the launcher at random moments, let it recover, and "
        "compare ledger and (with --shards) weights with an undisturbed run. Exit code 0: all came back the same."
    )
    plan: Plan = _planned("chaos", Plan, often, args, about)
    show(report := chaos(plan, say=complain))
    return 0 if report.holds else EXIT_FAILURE


def compare(args: list[str]) -> int:
    """Measure strategies under equal conditions."""
    from lockstep.tools.compare.plan import Plan

    about = (
        "Train by the recipe `{}` with each strategy on each number of processes, in turns, with the same global "
        "batch, order, evaluation, total threads and total --workers, and table speed, waiting, memory and accuracy. "
        "The same command with the same --out goes on with what is missing. Exit code 1: the rows are not comparable."
    )
    plan: Plan = _planned("compare", Plan, Plan.of, args, about)
    from lockstep.tools.compare.run import compare
    from lockstep.tools.compare.tables import show

    show(results := compare(plan, say=complain))
    return 0 if results["fair"] else EXIT_FAILURE


def predict(args: list[str]) -> int:
    """Predict the step on N processes."""
    from lockstep.tools.predict.plan import Plan

    about = "Measure the recipe `{}` briefly and predict its step on N processes; --out names a file or folder."
    plan: Plan = _planned("predict", Plan, Plan.of, args, about)
    from lockstep.tools.predict.forecast import predict
    from lockstep.tools.predict.show import tell

    tell(predict(plan, say=complain))
    return 0


def doctor(args: list[str]) -> int:
    """Try what a run needs from this machine and the network."""
    from lockstep.tools.doctor.plan import Plan

    names, rest = sort_words(args, Plan)
    if names:
        raise UserError(
            f"doctor takes flags alone, got {' '.join(names)}", "Values follow a flag: --only host,network."
        )
    about = (
        "Try what a run needs: all-reduces between processes and GPUs, ports, names, disk, memory, cores, the way to "
        "machine 0; each with a deadline. Exit code 1: a check failed (a warning does not)."
    )
    plan: Plan = _parse(Plan, Plan(), rest, "lockstep doctor", about)
    from lockstep.tools.doctor.run import doctor
    from lockstep.tools.doctor.show import as_json, healthy, show, summary

    found = doctor(plan, say=complain, show=(lambda _: None) if plan.json else show)
    print(as_json(found) if plan.json else summary(found))
    return 0 if healthy(found) else EXIT_FAILURE


def export(args: list[str]) -> int:
    """Write a run's weights for other programs."""
    from lockstep.checkpoint.foreign import Export, export

    names, rest = sort_words(args, Export)
    run_folder = _one_name("export", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("export needs a run folder", "As `lockstep export runs/digits-20260101-120000`.")
    chosen: Export = _parse(
        Export, Export(), rest, "lockstep export RUN", "Write a run's weights as one file for other programs."
    )
    print(export(run_folder, chosen))
    return 0


def launch_script(args: list[str]) -> int:
    """Write the file or the lines that start a run on a cluster."""
    from lockstep.tools.launch_script import TARGETS, deliver

    usage = f"lockstep launch-script {'|'.join(TARGETS)} [RECIPE] [FLAGS]"
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\nIts flags, by target: lockstep launch-script slurm --help")
        return 0
    if args[0] not in TARGETS:
        raise unknown("target", args[0], TARGETS, f"As `{usage}`.")
    cls, script = TARGETS[args[0]]
    about = f"Write what starts the recipe `{{}}` by {args[0]}; every flag of `lockstep train` may follow."
    names, rest = sort_words(args[1:], cls)
    name = _one_name(f"launch-script {args[0]}", "recipe", names) or "digits"
    prog = f"lockstep launch-script {args[0]} {name}"
    plan: Any = _parse(cls, cls.of(recipe(name)), rest, prog, about.format(name))
    deliver(script(plan), plan.file)
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
