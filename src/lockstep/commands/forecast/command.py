"""What `lockstep forecast` takes, and its exit code."""

from lockstep.commands.shared.arguments import complain, planned


def main(args: list[str]) -> int:
    """Predict the step on N processes."""
    from lockstep.commands.forecast.plan import Plan

    about = "Measure the recipe `{}` briefly and predict its step on N processes; --out names a file or folder."
    plan: Plan = planned("predict", Plan, Plan.of, args, about)
    from lockstep.commands.forecast.forecast import predict
    from lockstep.commands.forecast.show import tell

    tell(predict(plan, say=complain))
    return 0
