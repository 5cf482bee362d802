"""What a run keeps beside its weights: optimizers, scalers, and schedules that count their own steps."""

import ast
import re

from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.program import Program, qualified, remembered
from lockstep.commands.lint.roles import optimizers
from lockstep.commands.lint.source import parameters


@remembered
def roles(program: Program) -> dict[ast.AST, str]:
    """The calls that make what a run keeps beside its weights -> what that is."""
    found: dict[ast.AST, str] = dict.fromkeys(optimizers(program), "optimizer")
    for name in ("GradScaler", "NativeScaler"):
        found |= dict.fromkeys(program.named.get(name, []), "scaler")
    return found | dict.fromkeys(schedulers(program), "scheduler")


@remembered
def schedulers(program: Program) -> list[ast.Call]:
    """The calls that make a schedule which counts its own steps: torch's, a local subclass's, a local class's."""
    found = []
    for call in program.calls:
        owner = definition(program, call.func)
        if ".lr_scheduler." in qualified(program, call.func) or (
            isinstance(owner, ast.ClassDef) and _counts_steps(program, owner)
        ):
            found.append(call)
    return found


def _counts_steps(program: Program, owner: ast.ClassDef) -> bool:
    if any(".lr_scheduler." in qualified(program, base) for base in owner.bases):
        return True
    step = method(program, owner, "step")
    if step is None or len(parameters(step)) > 1:
        return False
    text = ast.unparse(step)
    sets = re.search(r"\[['\"]lr['\"]\] (\*|/)?= ", ast.unparse(owner))
    return bool(sets) and bool(re.search(r"self\.\w+ \+= 1", text)) and "zero_grad" not in text
