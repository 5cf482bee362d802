"""The command `lockstep`. torch is imported only where a command needs it, so that help answers at once."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lockstep
from lockstep.config import Config, Execution
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError, unknown
from lockstep.recipes import RECIPES, recipe

_HELP = """usage: lockstep COMMAND [ARGUMENTS]

Train PyTorch image classifiers on one process or many; the number of processes changes the speed and nothing else.

commands:
  train [RECIPE] [FLAGS]   train; the recipe is digits where none is named
  eval RUN [FLAGS]         evaluate the weights of a run folder again, on any number of processes
  recipes                  list the recipes
  show RECIPE              print a recipe as flags

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
        _complain(str(error))
        code = EXIT_USER_ERROR
    except PeerError:
        code = EXIT_FAILURE
    except KeyboardInterrupt:
        print("\nlockstep: interrupted", file=sys.stderr)
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


def _complain(message: str) -> None:
    print(f"lockstep: {message}", file=sys.stderr, flush=True)


def _take_name(args: list[str], default: str) -> tuple[str, list[str]]:
    """The leading positional argument, and the rest."""
    return (args[0], args[1:]) if args and not args[0].startswith("-") else (default, args)


def _parse(cls: type, default: Any, args: list[str], prog: str, description: str) -> Any:
    import tyro
    from tyro.conf import OmitArgPrefixes, SuppressFixed

    markers = (OmitArgPrefixes, SuppressFixed)
    return tyro.cli(cls, default=default, args=args, prog=prog, description=description, config=markers)


def _train(args: list[str]) -> int:
    name, rest = _take_name(args, "digits")
    config: Config = _parse(
        Config,
        recipe(name),
        rest,
        f"lockstep train {name}",
        f"Train by the recipe `{name}` (of {', '.join(RECIPES)}, or package.module:function). "
        "--batch-size is global: it is shared out over all processes.",
    )
    from lockstep.launcher import WorkerFailed, launch, processes
    from lockstep.run import check, claim_folder, run
    from lockstep.world import joined

    check(config)
    execution, folder = config.execution, ""
    if not joined():
        config.require_batch_for(processes(execution) * execution.nnodes)
        folder = str(claim_folder(config)) if execution.node_rank == 0 else ""
    try:
        launch(run, config, folder, execution=execution)
    except WorkerFailed as failed:
        return _tell(failed)
    return 0


def _tell(failed: Any) -> int:
    if failed.trace:
        print(failed.trace, file=sys.stderr)
    _complain(f"rank {failed.rank} failed: {failed.message}")
    return int(failed.exit_code)


def _eval(args: list[str]) -> int:
    run_folder, rest = _take_name(args, "")
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("eval needs a run folder", "As `lockstep eval runs/digits-20260101-120000`.")
    from lockstep.run import Evaluation, evaluate_run, read_config

    config = read_config(run_folder) if run_folder else Config()
    default = Evaluation(execution=dataclasses.replace(Execution(), data_dir=config.execution.data_dir))
    chosen = _parse(Evaluation, default, rest, "lockstep eval RUN", "Evaluate a run's saved weights again.")
    from lockstep.launcher import WorkerFailed, launch

    try:
        launch(evaluate_run, config, run_folder, chosen, execution=chosen.execution)
    except WorkerFailed as failed:
        return _tell(failed)
    return 0


def _recipes(args: list[str]) -> int:
    if args:
        raise UserError(f"recipes takes no arguments, got {' '.join(args)}", "`lockstep show RECIPE` prints one.")
    width = max(map(len, RECIPES))
    for name, function in RECIPES.items():
        print(f"{name:<{width}}  {(function.__doc__ or '').splitlines()[0]}")
    return 0


def _show(args: list[str]) -> int:
    name, rest = _take_name(args, "digits")
    if rest:
        raise UserError(f"show takes one recipe, got {' '.join(args)}", "As `lockstep show mnist`.")
    config = recipe(name)
    print((RECIPES[name].__doc__ or "").strip() if name in RECIPES else name)
    for group in (config, config.data, config.model, config.optim, config.execution):
        print()
        for item in dataclasses.fields(group):
            value = getattr(group, item.name)
            if dataclasses.is_dataclass(value) or item.name == "recipe":
                continue
            print(_as_flag(item.name, value))
    return 0


def _as_flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"--{flag} {text or repr('')}"
