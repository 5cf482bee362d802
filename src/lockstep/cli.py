"""The command `lockstep`: its help, and how it ends."""

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

import lockstep
from lockstep.commands import COMMANDS
from lockstep.commands.shared import help
from lockstep.commands.shared.arguments import HelpAsked, local_run, print_error, print_failure
from lockstep.distributed.failures import WorkerFailed, at_a_limit, called_at
from lockstep.distributed.files import require_local
from lockstep.distributed.output import unbreakable_output, with_required_output
from lockstep.distributed.proc import children
from lockstep.distributed.signals import finish
from lockstep.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, PeerError, UserError, is_url, unknown

_RUN_SCRIPTS = ("audit", "reproduce", "lint")  # others' scripts, whose arguments are their own
_OF_A_RUN = ("eval", "predict", "export", "report", "show")  # take the address of one, which is fetched first
_GO_ON = (["train"], ["sweep"], ["compare"])  # what they make is a folder: they go on without their output

# Turns for which an idle OpenMP thread stays awake. With libgomp's own, 300,000, two threads beside any other work take
# twice as long, since the one that waits holds the core that the other needs; on a quiet machine this costs 1 to 6 %.
_SPIN = "10000"

_HEAD = "Train PyTorch image classifiers on one process or many; the number of processes changes only the speed."
_TAIL = """`lockstep COMMAND --help` explains a command. Data sets lie in --data-dir, $LOCKSTEP_DATA or ./data.
Exit codes: 0 done, 1 a process failed, 2 something that you can put right, 124 no progress for --hang-timeout; \
stopped by a signal, after a checkpoint: 130 (Ctrl-C), 143 (SIGTERM), 138 (SIGUSR1)."""
_EXAMPLES = (
    "lockstep train",
    "lockstep train photos --data-dir ~/flowers",
    "torchrun --nproc-per-node 4 -m lockstep train mnist",
    "lockstep predict runs/one photo.jpg",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    args, before = list(sys.argv[1:] if argv is None else argv), children()
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:  # OpenMP reads it as torch loads it
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN)
    with unbreakable_output():
        code = _exit_code(args)
    if argv is None and "torch" in sys.modules:
        finish(args[0], code, before)
    sys.exit(code)


def _exit_code(args: list[str]) -> int:
    try:
        return _dispatch(args) if args[:1] in _GO_ON else with_required_output(_dispatch, args)
    except UserError as error:
        print_error(f"{error}{called_at(error)}", once_a_host=True)
        return EXIT_USER_ERROR
    except WorkerFailed as failed:
        return print_failure(failed)
    except PeerError as error:
        print_error(str(error))
        return EXIT_FAILURE
    except (OSError, RuntimeError, ImportError, MemoryError) as error:
        if (refusal := at_a_limit(error)) is None:
            raise
        print_error(str(refusal))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print_error("interrupted", once_a_host=True)
        return EXIT_INTERRUPTED


def _dispatch(args: list[str]) -> int:
    if args[:1] == ["help"]:
        args = [*args[1:], "--help"]
    if not args or args[0] in ("-h", "--help"):
        groups: dict[str, dict[str, str]] = {}
        for name, command in COMMANDS.items():
            groups.setdefault(command.group, {})[name] = command.summary
        print(help.front(groups, _HEAD, _TAIL, _EXAMPLES), end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"lockstep {lockstep.__version__} (torch {version('torch')}, torchvision {version('torchvision')})")
        return 0
    if args[0].startswith("-"):
        raise UserError(f"{args[0]} stands before a command", "Flags follow one: `lockstep train --epochs 3`.")
    if args[0] not in COMMANDS:
        raise unknown("command", args[0], COMMANDS, "See `lockstep --help`.")
    args = local_run(args) if args[0] in _OF_A_RUN else args
    for before, word in pairwise(args) if args[0] not in (*_RUN_SCRIPTS, "index") else ():
        flag, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if value.startswith("shards:") or (args[0] == "train" and flag == "--out" and is_url(value)):
            continue
        require_local(value.removeprefix("table:"), flag if flag.startswith("--") else "")
    command = COMMANDS[args[0]]
    try:
        return command.run(args[1:])
    except HelpAsked as asked:
        usage, about = f"lockstep {args[0]} {command.arguments}".rstrip(), asked.about or f"{command.summary}."
        print(
            help.text(usage, about, asked.default, asked.topic, [f"lockstep {each}" for each in command.examples]),
            end="",
        )
        return 0
