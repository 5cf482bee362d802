"""`lockstep eval`: evaluate a run's saved weights again."""

import dataclasses
import os
from pathlib import Path

from lockstep.commands.shared.arguments import launched, one_name, parse
from lockstep.commands.shared.helping import asked
from lockstep.config import Config, Execution
from lockstep.config.evaluation import Evaluation
from lockstep.config.fields import require
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError
from lockstep.processes.files import named
from lockstep.processes.output import status


def main(args: list[str]) -> int:
    """Evaluate a run's saved weights again."""
    names, rest = split_arguments(args, Evaluation)
    run_folder, about = (
        one_name("eval", "run folder", names),
        "Evaluate a run's saved weights, on any number of processes.",
    )
    how = ("lockstep eval RUN", about)
    if asked(rest) is not None:
        parse(Evaluation, Evaluation(), rest, *how)
    if not run_folder:
        raise UserError("eval needs a run folder", "As `lockstep eval runs/digits-20260101-120000`.")
    if os.environ.get("RANK", "0") == "0":
        status("starting: importing torch")
    from lockstep.training.by_class import require_ending
    from lockstep.training.folder import evaluate_run, read_config, require_trusted

    alone = named(run_folder).is_file()  # weights, or a program, which are enough for other data
    config = Config() if alone else read_config(run_folder)
    default = Evaluation(execution=dataclasses.replace(Execution(), data_dir=config.execution.data_dir))
    chosen: Evaluation = parse(Evaluation, default, rest, *how)
    require_ending(chosen.report)
    if chosen.data:
        return _elsewhere(run_folder, chosen)
    if alone:
        raise UserError(f"{run_folder} is a file, which does not say where its data is", "Name that with --data.")
    require_trusted(config, run_folder, chosen.trust_code)
    return launched(evaluate_run, config, run_folder, chosen, execution=chosen.execution)


def _elsewhere(run: str, chosen: Evaluation) -> int:
    """Evaluate on other data than the run's."""
    from lockstep.data.named import is_code
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
