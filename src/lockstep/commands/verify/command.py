"""What `lockstep verify` takes, and its exit code."""

from lockstep.commands.shared.arguments import planned, print_error
from lockstep.errors import EXIT_FAILURE


def main(args: list[str]) -> int:
    """Compare the first steps on several numbers of processes."""
    from lockstep.commands.verify.plan import Plan

    about = (
        "Run the first steps of the recipe `{}` on several numbers of processes, compare ledger, images, losses, "
        "gradients, weights, buffers and evaluation, and name what makes them differ. Exit code 0: the mode's claim "
        "holds (--exact: the same bits; else: the same but for rounding), 1: it does not. --out DIR keeps the traces."
    )
    plan: Plan = planned("verify", Plan, lambda config: Plan(config=config), args, about)
    from lockstep.commands.verify.report import print_report
    from lockstep.commands.verify.run import verify

    print_report(report := verify(plan, log=print_error))
    return 0 if report.holds else EXIT_FAILURE
