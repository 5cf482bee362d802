"""A batch's mean, and the mean of a list of such: each batch counts once in it, whatever its size."""

import ast
import re

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant
from lockstep.commands.lint.tree import text_of, walk


def mean_of_list(node: ast.AST, place: ast.AST) -> bool:
    """np.mean(losses), sum(losses) / len(losses), torch.stack(losses).mean(), of the list that `place` appends to."""
    if not (isinstance(place, ast.Call) and isinstance(place.func, ast.Attribute)):
        return False
    held = text_of(place.func.value)

    def reads(part: ast.AST) -> bool:
        parts = (each for each in walk(part) if isinstance(each, ast.Name | ast.Attribute | ast.Subscript))
        return any(text_of(each) == held for each in parts)

    match node:
        case ast.Call(func=function) if last_name(function) in ("mean", "fmean", "nanmean"):
            return reads(node)
        case ast.BinOp(op=ast.Div(), left=left, right=ast.Call(func=ast.Name(id="len"), args=[counted])):
            return reads(left) and reads(counted)
    return False


def is_mean(program: Program, whole: ast.expr) -> bool:
    """Whether a value is one batch's mean: a loss that is asked for no sum, or what .mean() gives."""
    value = whole
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
        if value.func.attr == "mean":
            return True
        value = value.func.value  # .item(), .detach()
    if isinstance(value, ast.Call) and _is_loss(program, value.func):
        inner = origins(program, value) if callee(program, value) is not None else []
        calls: list[ast.Call] = [value, *(each for each in inner if isinstance(each, ast.Call))]
        return not any(_sums(program, each) for each in calls) and "size" not in text_of(whole)
    if not isinstance(value, ast.Name) or not re.search("loss|acc|error", value.id.lower()):
        return False
    found = origins(program, value)
    made = [each for each in found if isinstance(each, ast.Call)]
    if "loss" not in value.id.lower():
        return bool(made) and all(last_name(each.func) == "mean" for each in found if isinstance(each, ast.Call))
    return bool(made) and not any(_sums(program, each) for each in made) and len(made) == len(found)


def _is_loss(program: Program, function: ast.expr) -> bool:
    """A loss by its name, or an object of one of torch's classes of losses."""
    if re.search(r"loss|criterion|cross_entropy", text_of(function)):
        return True
    made = [qualified(program, each.func) for each in origins(program, function) if isinstance(each, ast.Call)]
    return bool(made) and all(re.match(r"torch\.nn\.(\w+\.)*\w+Loss$", each) for each in made)


def _sums(program: Program, call: ast.Call) -> bool:
    """Whether a loss is asked for its sum."""
    calls = [call, *(each for each in origins(program, call.func) if isinstance(each, ast.Call))]
    return any(
        keyword.arg == "reduction" and constant(program, keyword.value) != "mean"
        for each in calls
        for keyword in each.keywords
    )
