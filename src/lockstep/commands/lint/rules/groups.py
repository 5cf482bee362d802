"""Accumulation in an inner loop: backward for each of a group of batches, and one step after them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside, loops, model_calls, over_loader
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.source import Loop


@dataclass(frozen=True, eq=False)
class Group:
    """`loop` runs over the batches of one update, which comes after it."""

    loop: ast.For
    backward: ast.Call


@remembered
def groups(program: Program) -> list[Group]:
    """The loops whose passes each run forward and backward over a batch of their own, and that a step follows."""
    return list(_groups(program))


def _groups(program: Program) -> Iterator[Group]:
    for call in backwards(program):
        seen = set[Loop]()
        for path in loops(program, call):
            inner = path[0] if len(path) > 1 else None
            if not isinstance(inner, ast.For) or inner in seen or not _over_batches(program, inner):
                continue
            seen.add(inner)
            within = set(inside(program, inner))
            steps = [each for each in own_nodes(program, inner) if is_update(each) and each not in within]
            outer = path[1]
            around = [
                each for each in steps if _line(each) > (inner.end_lineno or 0) and _line(each) <= _last(outer, inner)
            ]
            if around and not any(is_update(each) for each in within):
                yield Group(inner, call)
                break


def _last(outer: Loop, inner: ast.For) -> int:
    """The last line of an outer loop of the same function; past all lines, where that loop is in a caller."""
    same = outer.lineno < inner.lineno and (outer.end_lineno or 0) >= (inner.end_lineno or 0)
    return outer.end_lineno or 0 if same else 10**9


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def is_update(node: ast.AST) -> bool:
    """optimizer.step() or scaler.step(optimizer), by its name."""
    if not (isinstance(node, ast.Call) and last_name(node.func) == "step" and isinstance(node.func, ast.Attribute)):
        return False
    return bool(re.search(r"opt|scaler", ast.unparse(node.func.value).lower()))


def _over_batches(program: Program, loop: ast.For) -> bool:
    """Whether each pass has a batch of its own: the next of an iterator, or one of a list of batches."""
    draws = any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "next"
        for each in ast.walk(loop)
    )
    counts = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) in ("range", "trange")
    if counts:
        return draws
    models = {ast.unparse(each.func) for each in model_calls(program, loop)}
    targets = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    batches = isinstance(loop.target, ast.Tuple) or bool(re.search("batch|micro|sample", ast.unparse(loop.target)))
    return bool(models) and not models & targets and batches and not over_loader(program, loop)


def whole_windows(program: Program) -> Iterator[ast.For]:
    """`for _ in range(len(loader) // k)` that takes k batches in each pass: the last, shorter group never comes."""
    for source in program.sources:
        for node in source.nodes:
            if isinstance(node, ast.For) and _zipped(program, node):
                yield node
            match node:
                case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[ast.BinOp(op=ast.FloorDiv()) as count])):
                    length = isinstance(count.left, ast.Call) and ast.unparse(count.left.func) == "len"
                    if length and "loader" in ast.unparse(count.left).lower() and _takes(node, count.right):
                        yield node


def _zipped(program: Program, loop: ast.For) -> bool:
    """zip(*[iter(loader)] * k): groups of k, and none of what is left; over batches, for training."""
    match loop.iter:
        case ast.Call(func=ast.Name(id="zip"), args=[ast.Starred(value=value)]):
            rows = [value, *origins(program, value)]
            repeated = [each for each in rows if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult)]
            text = " ".join(ast.unparse(each) for each in repeated)
            return "iter(" in text and any(call in set(inside(program, loop)) for call in backwards(program))
    return False


def _takes(loop: ast.For, size: ast.expr) -> bool:
    """islice(iterator, size), or next() in a loop over range(size)."""
    for each in ast.walk(loop):
        match each:
            case ast.Call(func=function, args=[_, last]) if last_name(function) == "islice":
                if ast.dump(last) == ast.dump(size):
                    return True
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[last])) if each is not loop:
                if ast.dump(last) == ast.dump(size) and "next(" in ast.unparse(each):
                    return True
    return False
