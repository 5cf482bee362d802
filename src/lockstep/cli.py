"""The command `lockstep`. torch is imported only where a command needs it, so that help answers at once."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lockstep
from lockstep.config import Config, Execution
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError, unknown
from lockstep.flags import as_command, sort_words
from lockstep.lifetime import leave
from lockstep.recipes import RECIPES, recipe

_TELLING_S = 10.0  # that a silent process lives on: when one ends, torchrun ends the others, also the one that tells

_HELP = """usage: lockstep COMMAND [ARGUMENTS]

Train PyTorch image classifiers on one process or many; the number of processes changes the speed and nothing else.

commands:
  train [RECIPE] [FLAGS]   train; the recipe is digits where none is named
  eval RUN [FLAGS]         evaluate the weights of a run folder again, on any number of processes
  verify [RECIPE] [FLAGS]  run the first steps on several numbers of processes, compare, and say why they differ
  chaos [RECIPE] [FLAGS]   kill a training at random moments, let it recover, compare it with an undisturbed one
  export RUN [FLAGS]       write a run's weights for other programs, as safetensors or torch.save
  recipes                  list the recipes
  show RECIPE              print a recipe as a command with all its flags, to copy and change

examples:
  lockstep train                                        the bundled digits, on all cores
  lockstep train mnist --nproc 2 --epochs 3             two processes on this machine
  lockstep train cifar10 --gpus 0,2 --precision bf16    two GPUs of it
  lockstep train folder --data-dir ~/flowers            your own train/ and val/ class folders
  torchrun --nproc-per-node 4 -m lockstep train mnist   started by another launcher
  lockstep eval runs/digits-20260101-120000 --nproc 1
  lockstep verify digits --nproc 1,2,4 --shards 8       the same bits on 1, 2 and 4 processes?
  lockstep chaos digits --shards 4 --kills 10           does it come back, and as the same run?

`lockstep COMMAND --help` explains a command. Data sets are looked for in --data-dir, $LOCKSTEP_DATA or ./data.
Exit codes: 0 done, 1 a process failed, 2 something that you can put right, 124 no progress for --hang-timeout;
stopped by a signal, after a checkpoint: 130 (Ctrl-C), 143 (SIGTERM), 138 (SIGUSR1), 129 (the terminal closed).
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(args)
    except UserError as error:
        _complain(str(error), once_a_host=True)
        code = EXIT_USER_ERROR
    except PeerError as error:
        _complain(str(error))
        code = EXIT_FAILURE
    except KeyboardInterrupt:
        _complain("interrupted", once_a_host=True)
        code = EXIT_INTERRUPTED
    if os.environ.get("RANK") and "torch.distributed" in sys.modules:
        leave(code)  # an ordinary end may abort: gloo's threads outlive the group, and want the interpreter's lock
    sys.exit(code)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"lockstep {lockstep.__version__} (torch {version('torch')}, torchvision {version('torchvision')})")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "verify": _verify,
        "chaos": _chaos,
        "export": _export,
        "recipes": _recipes,
        "show": _show,
    }
    if args[0] not in commands:
        raise unknown("command", args[0], commands, "See `lockstep --help`.")
    return commands[args[0]](args[1:])


def _complain(message: str, once_a_host: bool = False) -> None:
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


def _train(args: list[str]) -> int:
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
    from lockstep.launcher import processes
    from lockstep.run import check, claim_folder, discard_folder, position, run
    from lockstep.world import joined

    check(config)
    execution = config.execution
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
    from lockstep.launcher import WorkerFailed, launch

    try:
        stopped = max(value or 0 for value in launch(fn, *args, **how))
    except WorkerFailed as failed:
        return _tell(failed)
    return 128 + stopped if stopped else 0


def _tell(failed: Any) -> int:
    if failed.trace:
        print(failed.trace, file=sys.stderr)
    _complain(str(failed))
    return int(failed.exit_code)


def _eval(args: list[str]) -> int:
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


def _verify(args: list[str]) -> int:
    from lockstep.tools.plan import Plan

    names, rest = sort_words(args, Plan)
    name = _one_name("verify", "recipe", names) or "digits"
    plan: Plan = _parse(
        Plan,
        Plan.of(recipe(name)),
        rest,
        f"lockstep verify {name}",
        f"Run the first steps of the recipe `{name}` on several numbers of processes, compare ledger, images, losses, "
        "gradients, weights, buffers and evaluation, and name what makes them differ. Exit code 0: the mode's claim "
        "holds (--shards: the same bits; else: the same but for rounding), 1: it does not. --out DIR keeps the traces.",
    )
    from lockstep.launcher import WorkerFailed
    from lockstep.tools.verdict import show
    from lockstep.tools.verify import verify

    try:
        report = verify(plan, say=_complain)
    except WorkerFailed as failed:
        return _tell(failed)
    show(report)
    return 0 if report.holds else EXIT_FAILURE


def _chaos(args: list[str]) -> int:
    from lockstep.tools.chaos import Plan, chaos, show

    names, rest = sort_words(args, Plan)
    name = _one_name("chaos", "recipe", names) or "digits"
    config = recipe(name)
    config = dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, checkpoint_every="10steps"))
    plan: Plan = _parse(
        Plan,
        Plan(config=config),
        rest,
        f"lockstep chaos {name}",
        f"Train by the recipe `{name}` while killing processes and the launcher at random moments, let it recover, and "
        "compare ledger and (with --shards) weights with an undisturbed run. Exit code 0: all came back the same.",
    )
    report = chaos(plan, say=_complain)
    show(report)
    return 0 if report.holds else EXIT_FAILURE


def _export(args: list[str]) -> int:
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


def _recipes(args: list[str]) -> int:
    if args:
        raise UserError(f"recipes takes no arguments, got {' '.join(args)}", "`lockstep show RECIPE` prints one.")
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').splitlines()[0]}")
    return 0


def _show(args: list[str]) -> int:
    if len(args) > 1:
        raise UserError(f"show takes one recipe, got {' '.join(args)}", "As `lockstep show mnist`.")
    name = args[0] if args else "digits"
    config = recipe(name)
    for line in ((RECIPES[name].__doc__ or "") if name in RECIPES else name).strip().splitlines():
        print(f"# {line.strip()}".rstrip())
    print(as_command(f"lockstep train {name}", config))
    return 0
