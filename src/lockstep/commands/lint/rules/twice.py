"""The rule about batch and rate both adjusted to the number of processes."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.learning import factors, grows, is_n, is_scale, peaks, rates, set_later
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import loaders, sharding, training_loaders
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.rules.rates import batch_of, split_batches, written
from lockstep.commands.lint.several import distributed, library, lightning
from lockstep.commands.lint.source import Binding
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS209",
    "adjusted-twice",
    "batch size and learning rate are both adjusted to N",
    result="the global batch stays as it was, and the rate is N times too high: on 8 processes 8 times, which diverges "
    "or trains badly",
    why="the batch was divided by N, so a step sees as many samples as before; the rate belongs to that number",
    mend="SGD(model.parameters(), lr=lr)  # with batch_size // world_size",
)
def adjusted_twice(program: Program) -> Iterator[Hit]:
    """A batch divided by N beside a rate that grows with N; a rate multiplied twice."""
    divided = _divided(program)
    several = distributed(program) or managed(program)
    found = [(rate, grown) for rate in [*rates(program), *peaks(program)] if (grown := grows(program, rate))]
    for rate, _ in found:
        if (divided and not _of_the_divided(program, rate, divided)) or _twice(program, rate):
            yield Hit(written(program, rate), f"lr={text_of(rate)}")
            return
    if not several:
        return
    for binding in set_later(program):
        assert binding.value is not None
        if any(grown in walk(binding.node) for _, grown in found):
            continue  # the rate that is given to the optimizer, in a dictionary of settings
        more = _multiplies(program, binding)
        anew = divided and grows(program, binding.value) and not _of_the_divided(program, binding.value, divided)
        if (more and (found or divided)) or anew:
            yield Hit(binding.node, "the rate that was given to the optimizer")
            return
    for factor in factors(program):
        if (divided or found) and (is_n(factor) or grows(program, factor)):
            yield Hit(factor, f"a schedule's factor, {text_of(factor)}")
            return


def _divided(program: Program) -> list[ast.expr]:
    """What the batches of shared-out loaders are divided by N from; a constant where the framework divides."""
    found: list[ast.expr] = []
    for loader in loaders(program) if lightning(program) else training_loaders(program):
        batch = batch_of(program, loader)
        shared = sharding(program, loader) or prepared(program, loader)
        if batch is None or not (shared or library(program, "horovod") or lightning(program)):
            continue
        if split_batches(program) and prepared(program, loader):
            found.append(batch)

        def divides(node: ast.AST) -> bool:
            match node:
                case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right) if is_n(right):
                    found.append(left)
                case ast.AugAssign(target=target, op=ast.Div() | ast.FloorDiv(), value=value) if is_n(value):
                    found.append(target)
            return False

        depends(program, batch, divides)
    return found


def _of_the_divided(program: Program, rate: ast.AST, divided: list[ast.expr]) -> bool:
    """Whether a rate that grows with N is made of one process's batch: times N, that is the whole batch."""
    if depends(program, rate, lambda each: isinstance(each, ast.BinOp) and each.left in divided and _cut(each)):
        return True  # one process's batch itself, whatever its name
    if not depends(program, rate, _is_batch):
        return False
    whole = {text_of(each) for each in divided}
    cut = depends(program, rate, _cut) or any(
        isinstance(program.owner[each].parents[each], ast.AugAssign) for each in divided
    )
    return cut or not depends(program, rate, lambda each: isinstance(each, ast.expr) and text_of(each) in whole)


def _is_batch(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and "batch" in last_name(node).lower()


def _cut(node: ast.AST) -> bool:
    """A division by the number of processes."""
    match node:
        case (
            ast.BinOp(op=ast.Div() | ast.FloorDiv(), right=value)
            | ast.AugAssign(op=ast.Div() | ast.FloorDiv(), value=value)
        ):
            return is_n(value)
    return False


def _multiplies(program: Program, binding: Binding) -> bool:
    """`group["lr"] *= N`, or `group["lr"] = group["lr"] * N`."""
    match binding.node:
        case ast.AugAssign(op=ast.Mult(), value=value):
            return is_scale(program, value) or grows(program, value) is not None
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Mult(), right=right)):
            pairs = ((left, right), (right, left))
            return any(text_of(one) == text_of(target) and is_scale(program, other) for one, other in pairs)
    return False


def _twice(program: Program, rate: ast.expr) -> bool:
    """`lr * N` of a value that was multiplied by N where it was bound."""
    if (
        not isinstance(rate, ast.BinOp)
        or not isinstance(rate.op, ast.Mult)
        or not (is_n(rate.right) or is_n(rate.left))
    ):
        return False
    rest = rate.left if is_n(rate.right) else rate.right
    return grows(program, rest) is not None and not _sqrt(program, rate)


def _sqrt(program: Program, rate: ast.expr) -> bool:
    return depends(program, rate, lambda each: isinstance(each, ast.Call) and last_name(each.func) == "sqrt")
