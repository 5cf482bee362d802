"""`python -m lockstep` is the same program as `lockstep`."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
