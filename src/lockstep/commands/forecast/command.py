"""What `lockstep forecast` takes, and its exit code."""

from lockstep.commands.shared.arguments import planned, print_error


def main(args: list[str]) -> int:
    """Forecast the step on N processes."""
    from lockstep.commands.forecast.plan import Plan

    about = "Measure the recipe `{}` briefly and forecast its step on N processes; --out names a file or folder."
    plan: Plan = planned("forecast", Plan, lambda config: Plan(config=config), args, about)
    from lockstep.commands.forecast.report import print_report, write
    from lockstep.commands.forecast.run import forecast

    if (report := forecast(plan, log=print_error)) is None:
        print("took part; machine 0 has the forecast")
        return 0
    print_report(report)
    if out := plan.config.execution.out:
        print(f"written to {write(report, out)}")
    return 0
