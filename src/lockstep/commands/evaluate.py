"""`lockstep eval`: evaluate a run's saved weights again."""

import dataclasses
import os
from pathlib import Path

from lockstep.commands.shared.arguments import launched, one_name, parse
from lockstep.config import Config
from lockstep.config.execution import Evaluation
from lockstep.config.fields import require
from lockstep.distributed.files import named
from lockstep.distributed.output import status
from lockstep.errors import UserError


def main(args: list[str]) -> int:
    """Evaluate a run's saved weights again."""
    about = "Evaluate a run's saved weights, on any number of processes, or on other pictures by --data."
    names, chosen = parse(Evaluation(), args, about)
    run_folder = one_name("eval", "run folder", names, "runs/digits-20260101-120000")
    if os.environ.get("RANK", "0") == "0":
        status("starting: importing torch")
    from lockstep.training.evaluation import require_ending
    from lockstep.training.run_folder import evaluate_run, read_config

    alone = named(run_folder).is_file()  # weights, or a program, which are enough for other data
    require_ending(chosen.report)
    config = Config() if alone else read_config(run_folder, chosen.trust_code)
    data_dir = chosen.execution.data_dir or config.execution.data_dir
    execution = dataclasses.replace(chosen.execution, data_dir=data_dir)
    report = chosen.report and str(named(chosen.report))
    chosen = dataclasses.replace(chosen, report=report, execution=execution)
    if chosen.data:
        return _elsewhere(run_folder, chosen)
    if alone:
        raise UserError(f"{run_folder} is a file, which does not say where its data is", "Name that with --data.")
    return launched(evaluate_run, config, run_folder, chosen, execution=chosen.execution)


def _elsewhere(run: str, chosen: Evaluation) -> int:
    """Evaluate on other data than the run's."""
    from lockstep.config.data import is_code
    from lockstep.inference.elsewhere import evaluate_elsewhere
    from lockstep.inference.loading import require_usable, weights_file

    path = weights_file(run, chosen.weights)
    require_usable(path, chosen.trust_code)
    require(
        chosen.trust_code or not is_code(chosen.data) or Path(chosen.data).exists(),
        f"--data {chosen.data} is code that this would run",
        "Read it; if you trust it, give --trust-code.",
    )
    return launched(evaluate_elsewhere, str(path), chosen, execution=chosen.execution)
