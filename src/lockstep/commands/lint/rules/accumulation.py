"""The rule about the groups of passes that make one update: their losses have to be divided."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.dividing import divided, divided_in_place, gradients_divided
from lockstep.commands.lint.rules.groups import groups, over_parts
from lockstep.commands.lint.rules.units import unit
from lockstep.commands.lint.rules.windows import Accumulation, accumulations
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS201",
    "loss-not-divided",
    "the loss is not divided by the number of accumulated passes",
    result="gradients are k times as large: with 4 passes an update of SGD goes 4 times as far",
    why="backward() adds gradients up; each pass's loss is a mean over its own samples",
    mend="loss = loss / accumulate\nloss.backward()",
)
def loss_not_divided(program: Program) -> Iterator[Hit]:
    """Accumulation in which no division enters the loss, or the gradients."""
    if library(program, "deepspeed"):
        return
    yield from _undivided_parts(program)
    for group in groups(program):
        if not _divided(program, group.backward, group.loop, None):
            yield Hit(group.backward, "of each batch of a group")
    told = set[ast.Call]()
    for each in accumulations(program):
        fewer = any(unit(program, rate).accumulated <= -1 for rate in _rates(program))
        if each.backward in told or fewer or _by_accelerate(program, each.backward):
            continue
        if not _divided(program, each.backward, each.loop, each.every):
            told.add(each.backward)
            yield Hit(each.backward, f"every {text_of(each.every)} passes", _division(program, each))


def _divided(program: Program, call: ast.Call, loop: Loop | Function, every: ast.expr | None) -> bool:
    """Whether the loss of a backward pass is divided, or the gradients are."""
    head = walk(loop.target) if isinstance(loop, ast.For | ast.AsyncFor) else []
    targets = {each.id for each in head if isinstance(each, ast.Name)}
    values: list[ast.AST] = [*call.args]
    if isinstance(call.func, ast.Attribute) and not call.args:
        values.append(call.func.value)
    if any(divided(program, each, frozenset(targets), every) or divided_in_place(program, each) for each in values):
        return True
    return gradients_divided(inside(program, loop)) or gradients_divided(own_nodes(program, call))


def _by_accelerate(program: Program, call: ast.Call) -> bool:
    """accelerator.backward, which divides where Accelerate was told the number of passes."""
    told = any(
        each.arg in ("gradient_accumulation_steps", "gradient_accumulation_plugin")
        for made in program.named.get("Accelerator", [])
        for each in made.keywords
    ) or any(last_name(one.func) == "accumulate" for one in program.calls)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if owner is None or not told:
        return False
    made = origins(program, owner)
    return "accelerator" in text_of(owner).lower() or any(
        isinstance(each, ast.Call) and last_name(each.func) == "Accelerator" for each in made
    )


def _undivided_parts(program: Program) -> Iterator[Hit]:
    """A batch cut in parts by .chunk or .split, a backward pass for each, one step after them, and no division."""
    for call in backwards(program):
        around = [outer for outer in above(program.owner[call], call) if isinstance(outer, ast.For)]
        if len(around) < 2 or not over_parts(around[0]):
            continue
        steps = [each for each in walk(around[1]) if isinstance(each, ast.Call) and last_name(each.func) == "step"]
        within = set(walk(around[0]))
        sums = any(each.arg == "reduction" for part in within if isinstance(part, ast.Call) for each in part.keywords)
        values: list[ast.AST] = [*call.args, call.func]
        if (
            steps
            and not any(each in within for each in steps)
            and not sums
            and not any(depends(program, value, _divides) or divided_in_place(program, value) for value in values)
        ):
            yield Hit(call, "of each part")


def _divides(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
            return True
        case ast.Call(func=ast.Attribute(attr="div" | "div_" | "true_divide")):
            return True
        case ast.BinOp(op=ast.Mult()) | ast.AugAssign(op=ast.Mult()):
            return bool(re.search(r"scale|weight|inv|frac|ratio|1(\.0)? /", text_of(node)))
    return False


def _rates(program: Program) -> Iterator[ast.expr]:
    for call in program.calls:
        for each in call.keywords:
            if each.arg in ("lr", "learning_rate"):
                yield each.value


def _division(program: Program, each: Accumulation) -> tuple[Edit, ...]:
    """`loss = loss / k` above a plain loss.backward()."""
    match each.backward:
        case ast.Call(func=ast.Attribute(value=ast.Name()), args=[]) if not library(program, "accelerate"):
            statement = statement_of(program.owner[each.backward], each.backward)
            same = function_of(program.owner[each.every], each.every) is function_of(
                program.owner[statement], statement
            )
            plain = isinstance(each.every, ast.Name | ast.Attribute | ast.Constant)
            if isinstance(statement, ast.Expr) and plain and (same or isinstance(each.every, ast.Constant)):
                receiver = each.backward.func
                assert isinstance(receiver, ast.Attribute)
                end = receiver.value.end_col_offset or 0
                start = receiver.value.col_offset
                if receiver.value.end_lineno == receiver.value.lineno:
                    line = receiver.value.lineno
                    return (insert(line, start, "("), insert(line, end, f" / {text_of(each.every)})"))
    return ()
