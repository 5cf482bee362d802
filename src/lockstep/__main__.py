"""The program `lockstep`, which is `python -m lockstep` too."""

import os
import sys

from lockstep.errors import EXIT_USER_ERROR, NOT_ON_WINDOWS

_RUNS = {"train", "eval", "preview", "predict", "export", "verify", "chaos"}
_RUNS |= {"compare", "tune", "sweep", "lr-find", "forecast"}


def fix_hash_seed() -> None:
    """Start Python once more, in this process, where texts hash otherwise in each start: 15 ms, before any import.

    The order of a set of texts, as of class names, would else depend on the start: on the rank, under torchrun and its
    like, and on the run. Workers and other processes inherit the variable; one that is set stays as it is.
    """
    args = sys.argv[1:]
    own = args and sys.orig_argv[-len(args) :] == args  # not where a process of another program calls this
    if own and args[0] in _RUNS and "PYTHONHASHSEED" not in os.environ and not sys.flags.ignore_environment:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> None:
    """Run the command line and exit; on Windows, whose signals and files differ, say in one line where it runs."""
    if sys.platform == "win32":
        print(f"lockstep: {NOT_ON_WINDOWS}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    fix_hash_seed()
    from lockstep.cli import main as run

    run()


if __name__ == "__main__":
    main()
