"""What `lockstep tune` takes, and its exit code."""

from lockstep.commands.shared.arguments import planned, print_error


def main(args: list[str]) -> int:
    """Find the quickest way to train a recipe on this machine."""
    from lockstep.commands.tune.plan import Plan

    about = (
        "Measure how fast the recipe `{}` trains on this machine by its split over processes and threads, workers, "
        "memory layout, compilation and precision, one after the other, in a minute or two, and print the command to "
        "type. Examples: lockstep tune cifar10; lockstep tune mnist --axes split,precision --rounds 5."
    )
    plan: Plan = planned("tune", Plan, Plan.of, args, about)
    from lockstep.commands.tune.report import show
    from lockstep.commands.tune.run import tune

    show(tune(plan, log=print_error))
    return 0
