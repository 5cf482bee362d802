"""The command `lockstep`. torch is imported only where a command needs it, so that help answers at once."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lockstep
from lockstep.config import Config, Execution
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError, unknown
from lockstep.flags import as_command, sort_words
from lockstep.recipes import RECIPES, recipe

_HELP = """usage: lockstep COMMAND [ARGUMENTS]

Train PyTorch image classifiers on one process or many; the number of processes changes the speed and nothing else.

commands:
  train [RECIPE] [FLAGS]   train; the recipe is digits where none is named
  eval RUN [FLAGS]         evaluate the weights of a run folder again, on any number of processes
  recipes                  list the recipes
  show RECIPE              print a recipe as a command with all its flags, to copy and change

examples:
  lockstep train                                        the bundled digits, on all cores
  lockstep train mnist --nproc 2 --epochs 3             two processes on this machine
  lockstep train cifar10 --gpus 0,2 --precision bf16    two GPUs of it
  lockstep train folder --data-dir ~/flowers            your own train/ and val/ class folders
  torchrun --nproc-per-node 4 -m lockstep train mnist   started by another launcher
  lockstep eval runs/digits-20260101-120000 --nproc 1

`lockstep COMMAND --help` explains a command. Data sets are looked for in --data-dir, $LOCKSTEP_DATA or ./data.
Exit codes: 0 done, 1 a process failed, 2 something that you can put right, 130 interrupted.
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
        "recipes": _recipes,
        "show": _show,
    }
    if args[0] not in commands:
        raise unknown("command", args[0], commands, "See `lockstep --help`.")
    return commands[args[0]](args[1:])


def _complain(message: str, once_a_host: bool = False) -> None:
    """Tell the user. `once_a_host`: all of torchrun's processes come to the same error, and one of them tells."""
    if once_a_host and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
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
    from lockstep.run import check, claim_folder, discard_folder, run
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
        return _launch(run, config, str(folder), execution=execution)
    finally:
        discard_folder(folder)


def _launch(fn: Callable[..., Any], *args: Any, execution: Execution) -> int:
    from lockstep.launcher import WorkerFailed, launch

    try:
        launch(fn, *args, execution=execution)
    except WorkerFailed as failed:
        if failed.trace:
            print(failed.trace, file=sys.stderr)
        _complain(str(failed))
        return failed.exit_code
    return 0


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
