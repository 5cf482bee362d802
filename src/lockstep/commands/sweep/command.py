"""`lockstep sweep`: its words and its exit code."""

from lockstep.commands.shared.arguments import planned, print_error
from lockstep.errors import EXIT_FAILURE


def main(args: list[str]) -> int:
    """Train variants of a recipe, and compare them."""
    from lockstep.commands.sweep.plan import Plan

    about = (
        "Train by the recipe `{}` once for every combination of the values of --vary, one run after the other, and "
        "table what came of them, with intervals over seeds. Runs of one seed share every draw, so the differences "
        "are paired. The same command with the same --out goes on with what is missing; more values are welcome. "
        "Example: lockstep sweep digits --vary lr=1e-3,3e-3 --vary seed=0,1,2."
    )
    plan: Plan = planned("sweep", Plan, lambda config: Plan(config=config), _joined(args), about)
    from lockstep.commands.sweep.run import sweep
    from lockstep.commands.sweep.table import show

    show(results := sweep(plan, log=print_error))
    return EXIT_FAILURE if any(row["failed"] for row in results["rows"]) else 0


def _joined(args: list[str]) -> list[str]:
    """Several --vary as one, whose values are separated by commas as in each of them."""
    parts, rest, queue = [], [], iter(args)
    for argument in queue:
        typed, equals, value = argument.partition("=")
        if typed == "--vary":
            parts.append(value if equals else next(queue, ""))
        else:
            rest.append(argument)
    return [*rest, f"--vary={','.join(parts)}"] if parts else rest
