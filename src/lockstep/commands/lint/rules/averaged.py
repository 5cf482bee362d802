"""Averaged copies of a model: which of them a loop judges, and whether eval() is said to them."""

import ast

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import model_calls
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.source import Loop


def evaluates_another(program: Program, loop: Loop) -> bool:
    """Whether a loop judges an averaged copy, made in training mode, while eval() is said to other models alone."""
    for call in model_calls(program, loop):
        made = origins(program, call.func)
        copy = made[0] if len(made) == 1 and isinstance(made[0], ast.Call) else None
        if copy is None or last_name(copy.func) not in ("AveragedModel", "deepcopy"):
            continue
        home = program.owner[copy]
        early = any(isinstance(outer, Loop) for outer in above(home, copy))
        said = [each for name in ("eval", "train") for each in program.named.get(name, [])]
        if not early and all(_is_another(program, each, copy) for each in said):
            return True
    return False


def _is_another(program: Program, call: ast.Call, copy: ast.Call) -> bool:
    """Whether a call of eval() or train() is surely no other model's that a copy is, or is made of beforehand."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if owner is None or qualified(program, call.func):
        return True
    made = origins(program, owner)
    known = bool(made) and all(isinstance(each, ast.Call) and each is not copy for each in made)
    same = function_of(program.owner[call], call) is function_of(program.owner[copy], copy)
    return known and not (same and call.lineno <= copy.lineno and last_name(call.func) == "eval")
