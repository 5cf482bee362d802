"""What `lockstep compare` takes, and its exit code."""

from lockstep.commands.shared.arguments import planned, print_error
from lockstep.errors import EXIT_FAILURE


def main(args: list[str]) -> int:
    """Measure strategies under equal conditions."""
    from lockstep.commands.compare.plan import Plan

    about = (
        "Train by the recipe `{}` with each strategy on each number of processes, in turns, with the same global "
        "batch, order, evaluation, total threads and total --workers, and table speed, waiting, memory and accuracy. "
        "The same command with the same --out goes on with what is missing. Exit code 1: the rows are not comparable."
    )
    plan: Plan = planned("compare", Plan, Plan.of, args, about)
    from lockstep.commands.compare.run import compare
    from lockstep.commands.compare.tables import show

    show(results := compare(plan, log=print_error))
    return 0 if results["fair"] else EXIT_FAILURE
