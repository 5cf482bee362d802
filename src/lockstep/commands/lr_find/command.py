"""`lockstep lr-find`: its words and its exit code."""

from pathlib import Path

from lockstep.commands.shared.arguments import launched, planned
from lockstep.config.fields import require


def main(args: list[str]) -> int:
    """Find a learning rate."""
    about = (
        "Train by the recipe `{}` for some steps in which the learning rate rises from --lr-min to --lr-max, each time "
        "by the same factor, draw the loss over the rate, and suggest where it falls most steeply. Leaves no run."
    )
    from lockstep.commands.lr_find.plan import Plan

    plan: Plan = planned("lr-find", Plan, lambda config: Plan(config=config), args, about)
    from lockstep.commands.lr_find.run import find
    from lockstep.training.folder import check

    for path in (Path(plan.file), plan.numbers):
        require(not path.exists(), f"{path} exists already", "Name another file with --file, or remove that one.")
    check(plan.config)
    return launched(find, plan, execution=plan.config.execution)
