"""`lockstep lint`: hands over to the package lockstep-lint."""

import importlib
import importlib.util

from lockstep.errors import UserError


def main(args: list[str]) -> int:
    """Run lockstep-lint. Raises UserError where it is not installed."""
    if importlib.util.find_spec("lockstep_lint") is None:
        remedy = "pip install ./packages/lockstep_lint (in a checkout of Lockstep)"
        raise UserError("lint is a package of its own, which is not installed", remedy)
    code: int = importlib.import_module("lockstep_lint.cli").main(args)
    return code
