"""`lockstep reproduce`: what it does with its arguments, and its exit code. Imports no torch."""

from pathlib import Path

from lockstep.commands.reproduce.start import Reproduce
from lockstep.commands.shared.arguments import parse, refuse_launched
from lockstep.errors import EXIT_FAILURE, UserError


def main(args: list[str]) -> int:
    """Write a script's experiment as a recipe, with proof; 0: the losses agree, 1: they don't, 2: not of that shape."""
    about = (
        "Run a training script for a few steps, recorded, and write the same experiment as a recipe of Lockstep's, "
        "with proof: the same first weights, the same samples in the same order, and the losses of the first steps "
        "side by side. It runs the script: don't give it one that you would not run. Flags stand before the script. "
        "Exit codes: 0 the losses agree until rounding, 1 they don't, 2 the script is of another shape."
    )
    names, chosen = parse(Reproduce(), args, about, script=True)
    refuse_launched("reproduce", "Give the script's processes by --nproc.")
    if not names:
        raise UserError("reproduce takes a script, got none", "As `lockstep reproduce train.py --epochs 3`.")
    script, *arguments = names
    if not Path(script).is_file():
        raise UserError(f"{script} is not there", "Name the Python file that you would start.")
    from lockstep.commands.reproduce.report import reproduce

    return 0 if reproduce(chosen, Path(script).absolute(), arguments) else EXIT_FAILURE
