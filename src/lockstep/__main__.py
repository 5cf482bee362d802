"""The program `lockstep`, which is `python -m lockstep` too."""

import sys

from lockstep.errors import EXIT_USER_ERROR, NOT_ON_WINDOWS


def main() -> None:
    """Run the command line and exit; on Windows, whose signals and files differ, say in one line where it runs."""
    if sys.platform == "win32":
        print(f"lockstep: {NOT_ON_WINDOWS}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    from lockstep.cli import main as run

    run()


if __name__ == "__main__":
    main()
