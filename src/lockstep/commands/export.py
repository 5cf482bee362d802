"""`lockstep export`: a run's weights as one file for other programs."""

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError


def main(args: list[str]) -> int:
    """Write a run's weights for other programs."""
    from lockstep.checkpoint.foreign import Export, export

    names, rest = split_arguments(args, Export)
    run_folder = one_name("export", "run folder", names)
    if not run_folder and not {"-h", "--help"} & set(rest):
        raise UserError("export needs a run folder", "As `lockstep export runs/digits-20260101-120000`.")
    chosen: Export = parse(
        Export, Export(), rest, "lockstep export RUN", "Write a run's weights as one file for other programs."
    )
    print(export(run_folder, chosen))
    return 0
