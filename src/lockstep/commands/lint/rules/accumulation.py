"""Rules about the groups of passes that make one update: their losses divided, the last of them not lost."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside, loops, over_loader, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.dividing import divided, divided_in_place, gradients_divided
from lockstep.commands.lint.rules.groups import groups, over_parts, whole_windows
from lockstep.commands.lint.rules.units import unit
from lockstep.commands.lint.rules.windows import Accumulation, accumulations, updates_weights
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


@rule(
    "LS202",
    "remainder-dropped",
    "the last, shorter group of accumulated passes makes no update",
    result="with 782 batches and k = 4 the last 2 batches' gradients are dropped, or enter the next epoch's first "
    "update",
    why="the step runs where (i + 1) % k == 0 alone, and nothing runs it after the loop",
    mend="if (i + 1) % accumulate == 0 or i + 1 == len(loader):\n    optimizer.step()",
)
def remainder_dropped(program: Program) -> Iterator[Hit]:
    """Accumulation by `%` alone over a loader, and no step after the loop."""
    yield from (Hit(node) for node in dict.fromkeys(whole_windows(program)))
    told = set[ast.If]()
    for each in accumulations(program):
        if not isinstance(each.loop, ast.For) or not over_loader(program, each.loop) or each.when in told:
            continue
        told_more = [part for part in each.meant if not isinstance(part, ast.Name | ast.Attribute)] or each.meant
        text = " ".join(text_of(part) for part in told_more)
        calls = (node for node in inside(program, each.loop) if isinstance(node, ast.Call))
        shorter = {call for call in calls if last_name(call.func) == "min"}
        flag = any(_is_more(node) for part in each.meant for node in walk(part)) or depends(
            program, each.when.test, shorter.__contains__
        )  # the length of a group, or of what is left
        if flag or re.search(r"len\(|last|num_batches|total|end\b|final", text) or _whole_groups(program, each):
            continue
        if not (_otherwise(program, each) or _goes_on(program, each) or _after(program, each)):
            told.add(each.when)
            yield Hit(each.when)


def _after(program: Program, each: Accumulation) -> bool:
    """Whether an update runs past the loop: in its function, or anywhere outside of loops over batches."""
    batches = step_loops(program)
    for call in program.named.get("step", []):
        if updates_weights(program, call) and any(not set(path) & set(batches) for path in loops(program, call)):
            return True
    last = each.loop.end_lineno or 0
    return any(
        last_name(one.func) == "step" and one.lineno > last and "sched" not in text_of(one.func)
        for one in own_nodes(program, each.loop)
        if isinstance(one, ast.Call)
    )


def _otherwise(program: Program, each: Accumulation) -> bool:
    """Whether a name in the condition has another meaning too, in another branch, which counts in another way."""
    for name in each.meant:
        known = bindings(program, name, name.id) if isinstance(name, ast.Name) else []
        values = [one.value for one in known if one.kind == "value" and one.value is not None]
        counts = [any(isinstance(part, ast.Mod) for part in walk(value)) for value in values]
        if len(values) > 1 and any(counts) and not all(counts):
            return True
    return False


def _goes_on(program: Program, each: Accumulation) -> bool:
    """Whether the groups go on over epochs: a loop that begins anew by itself, or a counter that isn't set back."""
    assert isinstance(each.loop, ast.For)
    if any(last_name(node) in ("cycle", "count", "repeat") for node in walk(each.loop.iter)):
        return True
    if any(isinstance(node, ast.While) for node in inside(program, each.loop.iter)):
        return True
    return any(
        _runs_on(program, node.left, each.loop)
        for part in each.meant
        for node in walk(part)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    )


def _runs_on(program: Program, number: ast.expr, loop: Loop) -> bool:
    """Whether a number is counted up in a loop, and set back in none around it, as the gradients are."""
    source, around = program.owner[loop], step_loops(program).get(loop, [])
    for node in walk(number):
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        known = bindings(program, node, node.id) if isinstance(node, ast.Name) else []
        known = known or source.attributes.get(text_of(node), [])
        counted = any(each.kind == "aug" for each in known)
        if not around or not counted or not all(each.kind in ("aug", "value") for each in known):
            continue
        emptied = [
            each for each in program.named.get("zero_grad", []) if loop not in set(above(program.owner[each], each))
        ]
        places = [each.node for each in known if each.kind == "value"] + list[ast.AST](emptied)
        return not any(outer in around for place in places for outer in above(program.owner[place], place))
    return False


def _is_more(node: ast.AST) -> bool:
    """A second condition, or a length: what lets the last group in."""
    either = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
    return either or (isinstance(node, ast.Call) and last_name(node.func) == "len")


def _left_out(program: Program, each: Accumulation) -> bool:
    """Whether passes past the last whole group are skipped: `if i // k >= updates: continue`."""
    every = ast.dump(each.every)

    def groups(node: ast.AST) -> bool:
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and ast.dump(node.right) == every

    return any(
        isinstance(node, ast.If)
        and isinstance(node.body[-1], ast.Continue | ast.Break)
        and depends(program, node.test, groups)
        for node in each.loop.body
    )


def _whole_groups(program: Program, each: Accumulation) -> bool:
    """Whether the loop's passes are cut to a multiple of k: islice, a floor division, or a length that is set."""
    assert isinstance(each.loop, ast.For)
    text = text_of(each.loop.iter)
    if "islice" in text or "//" in text or _left_out(program, each):
        return True
    whole = "\n".join(source.text for source in program.sources)
    return bool(re.search(r"len\(\w+\)\s*%\s*accum|//\s*accum\w*\s*\*\s*accum", whole))
