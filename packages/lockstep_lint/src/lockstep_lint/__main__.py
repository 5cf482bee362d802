"""`python -m lockstep_lint`."""

from lockstep_lint.cli import entry

if __name__ == "__main__":
    entry()
