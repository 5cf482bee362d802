"""`lockstep launch-script`: the file or the lines with which a scheduler, or torchrun on each machine, starts a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.commands.launch_script import kubernetes, slurm, torchrun
from lockstep.commands.launch_script.plan import Plan
from lockstep.commands.shared.arguments import planned
from lockstep.errors import UserError, unknown

# what a run is started by -> its plan, and what writes it
TARGETS: dict[str, tuple[type[Plan], Callable[[Any], str]]] = {
    "slurm": (slurm.SlurmPlan, slurm.script),
    "kubernetes": (kubernetes.KubernetesPlan, kubernetes.script),
    "torchrun": (torchrun.TorchrunPlan, torchrun.script),
}


def main(args: list[str]) -> int:
    """Print what starts a run on a cluster, or write it to a file, which can be run where it is a script."""
    usage = f"lockstep launch-script {'|'.join(TARGETS)} [RECIPE] [FLAGS]"
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {usage}\n\nIts flags, by target: lockstep launch-script slurm --help")
        return 0
    if args[0] not in TARGETS:
        raise unknown("target", args[0], TARGETS, f"As `{usage}`.")
    cls, script = TARGETS[args[0]]
    about = f"Write what starts the recipe `{{}}` by {args[0]}; every flag of `lockstep train` may follow."
    plan: Plan = planned(f"launch-script {args[0]}", cls, cls.of, args[1:], about)
    text = script(plan)
    if not plan.file:
        print(text, end="")
        return 0
    path = Path(plan.file)
    try:
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}", "Name another file with --file.") from error
    return 0
