"""`lockstep eval`: evaluate a run's saved weights again."""

import dataclasses

from lockstep.commands.shared.arguments import launched, one_name, parse
from lockstep.config import Config, Execution
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError


def main(args: list[str]) -> int:
    """Evaluate a run's saved weights again."""
    from lockstep.training.by_class import require_ending
    from lockstep.training.folder import Evaluation, evaluate_run, read_config, require_trusted

    names, rest = split_arguments(args, Evaluation)
    run_folder = one_name("eval", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("eval needs a run folder", "As `lockstep eval runs/digits-20260101-120000`.")
    config = read_config(run_folder) if run_folder else Config()
    default = Evaluation(execution=dataclasses.replace(Execution(), data_dir=config.execution.data_dir))
    chosen: Evaluation = parse(
        Evaluation, default, rest, "lockstep eval RUN", "Evaluate a run's saved weights, on any number of processes."
    )
    require_trusted(config, run_folder, chosen.trust_code)
    require_ending(chosen.report)
    return launched(evaluate_run, config, run_folder, chosen, execution=chosen.execution)
