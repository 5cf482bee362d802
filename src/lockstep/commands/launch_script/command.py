"""What `lockstep launch-script` takes, and its exit code."""

from typing import Any

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.flags import split_arguments
from lockstep.config.recipes import recipe
from lockstep.errors import unknown


def main(args: list[str]) -> int:
    """Write the file or the lines that start a run on a cluster."""
    from lockstep.commands.launch_script.targets import TARGETS, deliver

    usage = f"lockstep launch-script {'|'.join(TARGETS)} [RECIPE] [FLAGS]"
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\nIts flags, by target: lockstep launch-script slurm --help")
        return 0
    if args[0] not in TARGETS:
        raise unknown("target", args[0], TARGETS, f"As `{usage}`.")
    cls, script = TARGETS[args[0]]
    about = f"Write what starts the recipe `{{}}` by {args[0]}; every flag of `lockstep train` may follow."
    names, rest = split_arguments(args[1:], cls)
    name = one_name(f"launch-script {args[0]}", "recipe", names) or "digits"
    prog = f"lockstep launch-script {args[0]} {name}"
    plan: Any = parse(cls, cls.of(recipe(name)), rest, prog, about.format(name))
    deliver(script(plan), plan.file)
    return 0
