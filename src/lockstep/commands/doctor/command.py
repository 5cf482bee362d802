"""What `lockstep doctor` takes, and its exit code."""

from lockstep.commands.shared.arguments import parse, print_error
from lockstep.config.flags import split_arguments
from lockstep.errors import EXIT_FAILURE, UserError


def main(args: list[str]) -> int:
    """Try what a run needs from this machine and the network."""
    from lockstep.commands.doctor.plan import Plan

    names, rest = split_arguments(args, Plan)
    if names:
        raise UserError(
            f"doctor takes flags alone, got {' '.join(names)}", "Values follow a flag: --only host,network."
        )
    about = (
        "Try what a run needs: all-reduces between processes and GPUs, ports, names, disk, memory, cores, the way to "
        "machine 0; each with a deadline. Exit code 1: a check failed (a warning does not)."
    )
    plan: Plan = parse(Plan, Plan(), rest, "lockstep doctor", about)
    from lockstep.commands.doctor.checks import findings
    from lockstep.commands.doctor.finding import as_json, healthy, show, summary

    found = []
    for finding in findings(plan, log=print_error):
        found.append(finding)
        if not plan.json:
            show(finding)
    print(as_json(found) if plan.json else summary(found))
    return 0 if healthy(found) else EXIT_FAILURE
