"""`lockstep launch-script`: the file or the lines with which a scheduler, or torchrun on each machine, starts a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.commands.launch_script import kubernetes, slurm, torchrun
from lockstep.commands.launch_script.plan import Plan
from lockstep.errors import UserError

# what a run is started by -> its plan, and what writes it
TARGETS: dict[str, tuple[type[Plan], Callable[[Any], str]]] = {
    "slurm": (slurm.SlurmPlan, slurm.script),
    "kubernetes": (kubernetes.KubernetesPlan, kubernetes.script),
    "torchrun": (torchrun.TorchrunPlan, torchrun.script),
}


def deliver(text: str, file: str) -> None:
    """Print the text, or write it to a file, which is executable where it begins as a script does."""
    if not file:
        print(text, end="")
        return
    path = Path(file)
    try:
        path.write_text(text, encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise UserError(f"{file} can't be written: {error.strerror}", "Name another file with --file.") from error
