"""Run the user's script in this process, recorded: `python -m lockstep.commands.audit.inside`, plan by environment."""

import importlib

from lockstep.commands.audit.plan import Plan

# modules of this package whose `install(plan)` runs before the script's first line, in this order
PARTS: tuple[str, ...] = ()


def install(plan: Plan) -> None:
    """Install all parts in this process: in the first one, and in each that it spawns."""
    for name in PARTS:
        importlib.import_module(f"lockstep.commands.audit.{name}").install(plan)
