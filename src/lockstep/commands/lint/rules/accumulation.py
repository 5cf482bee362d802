"""Rules about gradients on their way to the update: accumulation, clipping, no_sync."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.places import backwards, calls_in, over_loader, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.roles import constant, library
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.groups import groups, whole_windows
from lockstep.commands.lint.source import Loop, above, statement_of


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A step loop that updates every so many passes: `when` is the condition, `every` what the number is called."""

    loop: Loop
    when: ast.If
    every: ast.expr
    backward: ast.Call


@remembered
def accumulations(program: Program) -> list[Accumulation]:
    """The loops in which backward runs in each pass, and the optimizer's step under `i % k == 0`."""
    return list(_accumulations(program))


def _accumulations(program: Program) -> Iterator[Accumulation]:
    for loop in step_loops(program):
        for node in ast.walk(loop):
            every = _every(program, node.test) if isinstance(node, ast.If) else None
            if not isinstance(node, ast.If) or every is None or not _updates(program, node):
                continue
            for call in backwards(program):
                if call in set(ast.walk(loop)) and call not in set(ast.walk(node)):
                    yield Accumulation(loop, node, every, call)
                    break


def _every(program: Program, test: ast.expr) -> ast.expr | None:
    """k, where a condition holds `i % k`, itself or by a name."""
    for each in ast.walk(test):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
            return each.right
    for each in ast.walk(test):
        match each:
            case ast.Compare(ops=[ast.Eq() | ast.GtE()], comparators=[right]) if "accum" in ast.unparse(right).lower():
                return right
    for each in ast.walk(test):
        if isinstance(each, ast.Name):
            source = program.owner[each]
            for binding in source.names.get(source.scopes[each], {}).get(each.id, []):
                for inner in ast.walk(binding.value) if binding.kind == "value" and binding.value else []:
                    if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Mod):
                        return inner.right
    return None


def _updates(program: Program, node: ast.If) -> bool:
    steps = [call for part in node.body for call in calls_in(program, part, "step")]
    return any(
        ("sched" not in ast.unparse(call.func).lower() and "optim" in ast.unparse(call).lower())
        or last_name(call.func.value if isinstance(call.func, ast.Attribute) else call) in ("opt", "scaler", "optim")
        for call in steps
    )


def _divides(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
            return True
        case ast.Call(func=ast.Attribute(attr="div" | "div_" | "true_divide")):
            return True
        case ast.BinOp(op=ast.Mult()) if "1 /" in ast.unparse(node) or "1.0 /" in ast.unparse(node):
            return True
        case ast.BinOp(op=ast.Mult()) | ast.AugAssign(op=ast.Mult()):
            return bool(re.search(r"scale|weight|inv|frac|ratio", ast.unparse(node)))
    return False


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
    yield from _undivided_groups(program)
    for each in accumulations(program):
        call = each.backward
        values: list[ast.AST] = [*call.args, call.func.value if isinstance(call.func, ast.Attribute) else call]
        divided = any(depends(program, value, _divides) for value in values)
        name = ast.unparse(call.func)
        managed = any(last_name(one.func) == "accumulate" for one in program.calls) or any(
            one.arg == "gradient_accumulation_steps" and last_name(made.func) == "Accelerator"
            for made in program.named.get("Accelerator", [])
            for one in made.keywords
        )
        by_gradient = any(
            isinstance(node, ast.Attribute) and node.attr == "grad"
            for node in own_nodes(program, call)
            if isinstance(node, ast.Attribute)
        )
        sums = any(
            one.arg == "reduction" and constant(program, one.value) == "sum"
            for c in program.calls
            for one in c.keywords
        )
        by_rate = any(
            depends(program, one, _same_as(each.every))
            for one in _rates(program)
            if not isinstance(each.every, ast.Constant)
        )
        if not (divided or by_gradient or sums or by_rate or (managed and name.startswith("accelerator"))):
            yield Hit(call, f"every {ast.unparse(each.every)} passes", _division(program, each))


def _undivided_groups(program: Program) -> Iterator[Hit]:
    sums = any(
        one.arg == "reduction" and constant(program, one.value) == "sum" for c in program.calls for one in c.keywords
    )
    for group in groups(program) if not sums else []:
        call = group.backward
        values: list[ast.AST] = [*call.args, call.func.value if isinstance(call.func, ast.Attribute) else call]
        if not any(depends(program, value, _divides) for value in values):
            yield Hit(call, "of each batch of a group")


def _same_as(wanted: ast.expr) -> Callable[[ast.AST], bool]:
    text = ast.dump(wanted)
    return lambda node: ast.dump(node) == text


def _undivided_parts(program: Program) -> Iterator[Hit]:
    """A batch cut in parts by .chunk or .split, a backward pass for each, one step after them, and no division."""
    for call in backwards(program):
        around = [outer for outer in above(program.owner[call], call) if isinstance(outer, ast.For)]
        if len(around) < 2 or not re.search(r"\.(chunk|split|tensor_split)\(", ast.unparse(around[0].iter)):
            continue
        steps = [each for each in ast.walk(around[1]) if isinstance(each, ast.Call) and last_name(each.func) == "step"]
        inner = set(ast.walk(around[0]))
        values: list[ast.AST] = [*call.args, call.func]
        sums = any(
            each.arg == "reduction"
            for part in ast.walk(around[0])
            if isinstance(part, ast.Call)
            for each in part.keywords
        )
        if (
            steps
            and not any(each in inner for each in steps)
            and not sums
            and not any(depends(program, value, _divides) for value in values)
        ):
            yield Hit(call, "of each part")


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
            if isinstance(statement, ast.Expr) and isinstance(each.every, ast.Name | ast.Attribute | ast.Constant):
                receiver = each.backward.func
                assert isinstance(receiver, ast.Attribute)
                end = receiver.value.end_col_offset or 0
                start = receiver.value.col_offset
                if receiver.value.end_lineno == receiver.value.lineno:
                    line = receiver.value.lineno
                    return (insert(line, start, "("), insert(line, end, f" / {ast.unparse(each.every)})"))
            return ()
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
    yield from (Hit(loop) for loop in whole_windows(program))
    for each in accumulations(program):
        if not isinstance(each.loop, ast.For) or not over_loader(program, each.loop):
            continue
        test = ast.unparse(_meant(program, each.when.test))
        flag = any(_is_more(node) for part in _condition(program, each.when.test) for node in ast.walk(part))
        if flag or re.search(r"len\(|last|num_batches|total|end", test) or _whole_groups(program, each):
            continue
        after = [
            one for one in own_nodes(program, each.loop) if isinstance(one, ast.Call) and last_name(one.func) == "step"
        ]
        if not any(one.lineno > (each.loop.end_lineno or 0) and "sched" not in ast.unparse(one.func) for one in after):
            yield Hit(each.when)


def _meant(program: Program, test: ast.expr) -> ast.expr:
    """A condition, or what its name was bound to: last = (i + 1) % k == 0."""
    if isinstance(test, ast.Name):
        found = [b.value for b in bindings(program, test, test.id) if b.kind == "value"]
        if len(found) == 1 and isinstance(found[0], ast.expr):
            return found[0]
    return test


def _condition(program: Program, test: ast.expr) -> list[ast.AST]:
    """A condition, and what the names in it were bound to."""
    names = [each for each in ast.walk(test) if isinstance(each, ast.Name)]
    found = [binding for name in names for binding in bindings(program, name, name.id) if binding.kind == "value"]
    return [test, *(binding.value for binding in found if binding.value is not None)]


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
    text = ast.unparse(each.loop.iter)
    if "islice" in text or "//" in text or _left_out(program, each):
        return True
    whole = "\n".join(source.text for source in program.sources)
    return bool(re.search(r"len\(\w+\)\s*%\s*accum|//\s*accum\w*\s*\*\s*accum", whole))
