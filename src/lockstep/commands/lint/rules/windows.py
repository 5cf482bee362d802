"""Accumulation: the places in which backward runs in each pass, and the optimizer's step every so many passes."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.depends import entering
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.roles import optimizers
from lockstep.commands.lint.rules.by_ignite import engine_step
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Binding, Function, Loop
from lockstep.commands.lint.tree import text_of, walk

_Pass = Loop | Function


@dataclass(frozen=True, eq=False)
class Accumulation:
    """A loop, or a framework's step, that updates every so many passes: `when` is the condition, `every` the number.

    `meant` are the condition, and what its names and calls were bound to.
    """

    loop: Loop | Function
    when: ast.If
    every: ast.expr
    backward: ast.Call
    meant: tuple[ast.AST, ...]


@remembered
def accumulations(program: Program) -> list[Accumulation]:
    """The loops in which backward runs in each pass, and the optimizer's step under `i % k == 0`."""
    return list(_accumulations(program))


def _accumulations(program: Program) -> Iterator[Accumulation]:
    runs = backwards(program)
    for loop in passes(program):
        nodes = inside(program, loop)
        within = set(nodes)
        own = [call for call in runs if call in within]
        updates = [each for each in nodes if updates_weights(program, each)]
        for node in nodes if own and updates else []:
            meant = _meant(program, node.test) if isinstance(node, ast.If) else []
            every = _every(program, meant, within) if meant else None
            if every is None or not isinstance(node, ast.If):
                continue
            gated = _gated(program, node)
            always = [each for each in updates if each not in gated and not _elsewhere(program, node, each)]
            if always or not any(each in gated for each in updates):
                continue  # an update in each pass: the condition is about something else
            body = {each for part in node.body for each in inside(program, part)}
            other = {each for part in node.orelse for each in inside(program, part)}
            both = any(call in body for call in own) and any(call in other for call in own)
            free = [call for call in own if call not in gated]
            if both and not free:
                free = [call for call in own if (call in body) != any(each in body for each in updates)]
            if free:
                yield Accumulation(loop, node, every, free[0], tuple(meant))


def passes(program: Program) -> Iterator[_Pass]:
    """The loops over training batches, and the steps that Lightning and Ignite call for each."""
    yield from step_loops(program)
    if library(program, "lightning", "pytorch_lightning"):
        yield from program.methods.get("training_step", [])
    for call in program.named.get("Engine", []) if library(program, "ignite") else []:
        if (step := engine_step(program, call)) is not None:
            yield step


def _elsewhere(program: Program, one: ast.AST, other: ast.AST) -> bool:
    """Whether two places stand in different branches of a condition."""
    source = program.owner[one]
    around = {one, *above(source, one)}
    inner = other
    for outer in above(program.owner[other], other):
        if isinstance(outer, ast.If) and outer in around and outer is not one:
            mine = any(each in around for each in (outer.orelse if inner in outer.body else outer.body))
            return mine and inner is not outer.test
        inner = outer
    return False


def _gated(program: Program, node: ast.If) -> set[ast.AST]:
    """What runs under a condition: in its branches, or below `if ...: continue` of the same block."""
    found = {each for part in [*node.body, *node.orelse] for each in inside(program, part)}
    if isinstance(node.body[-1], ast.Continue | ast.Return):
        source = program.owner[node]
        block = getattr(source.parents[node], "body", [])
        for part in block[block.index(node) + 1 :] if node in block else []:
            found |= set(inside(program, part))
    return found


def updates_weights(program: Program, node: ast.AST) -> bool:
    """optimizer.step() or scaler.step(optimizer): by a name, or by what the object is."""
    if not (isinstance(node, ast.Call) and last_name(node.func) == "step" and isinstance(node.func, ast.Attribute)):
        return False
    text = text_of(node.func).lower()
    if "sched" in text:
        return False
    if "optim" in text_of(node).lower() or last_name(node.func.value) in ("opt", "scaler", "optim"):
        return True
    made = origins(program, node.func.value)
    return any(each in _optimizers(program) for each in made)


@remembered
def _optimizers(program: Program) -> frozenset[ast.AST]:
    scalers = program.named.get("GradScaler", [])
    lent = program.named.get("optimizers", []) if library(program, "lightning", "pytorch_lightning") else []
    return frozenset([*optimizers(program), *scalers, *lent])


def _meant(program: Program, test: ast.AST, depth: int = 0) -> list[ast.AST]:
    """A condition, and what the names and calls in it were bound to."""
    found: list[ast.AST] = [test]
    for each in walk(test) if depth < 3 else []:
        for made in entering(program, each):
            function = callee(program, made) if isinstance(made, ast.Call) else None
            asked = function is not None and function.name != "__init__"
            if asked or isinstance(made, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.BinOp | ast.Name):
                found += _meant(program, made, depth + 1)
    return found


def _every(program: Program, meant: list[ast.AST], within: set[ast.AST]) -> ast.expr | None:
    """k, where a condition holds `i % k`, or compares a counter with k that a pass sets to nothing, or one from k."""
    nodes = [each for part in meant for each in walk(part)]
    for each in nodes:
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
            return each.right
    for each in nodes:
        match each:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.LtE() | ast.Gt()], comparators=[ast.Constant(value=0)]):
                if (whole := _counter(program, left, within, ast.Sub)) is not None:
                    return whole
            case ast.Compare(left=left, ops=[ast.Eq() | ast.GtE()], comparators=[right]):
                if "accum" in text_of(right).lower() or _counter(program, left, within, ast.Add):
                    return right
            case ast.Compare(left=left, ops=[ast.Lt() | ast.NotEq()], comparators=[right]):
                if _counter(program, left, within, ast.Add):
                    return right
    return None


def _counter(program: Program, node: ast.expr, within: set[ast.AST], way: type[ast.operator]) -> ast.expr | None:
    """What the passes set a number back to that they count up by one, or down: up to k from 0, down to 0 from k."""
    known = bound(program, node)
    counted = any(
        isinstance(each.node, ast.AugAssign) and isinstance(each.node.op, way) and text_of(each.node.value) == "1"
        for each in known
    )
    for each in known if counted else []:
        if each.kind == "value" and each.node in within and isinstance(each.value, ast.expr):
            nothing = isinstance(each.value, ast.Constant) and each.value.value == 0
            if nothing is (way is ast.Add) and not isinstance(each.value, ast.BinOp):
                return each.value
    return None


def bound(program: Program, node: ast.AST) -> list[Binding]:
    """What a name, or an attribute as it is written, is bound to."""
    if isinstance(node, ast.Name):
        return bindings(program, node, node.id)
    return program.owner[node].attributes.get(text_of(node), []) if isinstance(node, ast.Attribute) else []
