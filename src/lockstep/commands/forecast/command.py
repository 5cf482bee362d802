"""What `lockstep forecast` takes, and its exit code."""

from lockstep.commands.shared.arguments import planned, print_error


def main(args: list[str]) -> int:
    """Forecast the step on N processes."""
    from lockstep.commands.forecast.plan import Plan

    about = "Measure the recipe `{}` briefly and forecast its step on N processes; --out names a file or folder."
    plan: Plan = planned("forecast", Plan, Plan.of, args, about)
    from lockstep.commands.forecast.report import tell
    from lockstep.commands.forecast.run import forecast

    tell(forecast(plan, log=print_error))
    return 0
