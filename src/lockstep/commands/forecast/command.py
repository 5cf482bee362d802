"""What `lockstep forecast` takes, and its exit code."""

from lockstep.commands.shared.arguments import complain, planned


def main(args: list[str]) -> int:
    """Forecast the step on N processes."""
    from lockstep.commands.forecast.plan import Plan

    about = "Measure the recipe `{}` briefly and forecast its step on N processes; --out names a file or folder."
    plan: Plan = planned("forecast", Plan, Plan.of, args, about)
    from lockstep.commands.forecast.forecast import forecast
    from lockstep.commands.forecast.show import tell

    tell(forecast(plan, say=complain))
    return 0
