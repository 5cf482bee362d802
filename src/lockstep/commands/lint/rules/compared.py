"""Which comparisons are of a number with the best one so far."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import following, statement_of
from lockstep.commands.lint.program import last_name
from lockstep.commands.lint.source import Source
from lockstep.commands.lint.tree import text_of, walk

_BEST = re.compile(r"best|lowest|highest|\b(min|max)_(loss|acc|auc|err|val|score|metric)|record\b")


def best_kept(source: Source) -> Iterator[ast.Compare]:
    """The comparisons of a number with the best one so far: by its name, or because it takes its place.

    `if score > self.top: self.top = score`.
    """
    for node in source.of(ast.Compare):
        if _BEST.search(text_of(node).lower()) or any(map(_most_of, [node.left, *node.comparators])):
            yield node
        elif len(node.ops) == 1 and isinstance(node.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE):
            left, right = text_of(node.left), text_of(node.comparators[0])
            above = statement_of(source, node)
            block = [above, *following(source, above)]
            if isinstance(above, ast.If) and any(
                _takes_place(each, left, right) for part in block for each in walk(part)
            ):
                yield node


def _most_of(node: ast.expr) -> bool:
    """max(history), the best of a list."""
    match node:
        case ast.Call(func=ast.Name(id="max" | "min"), args=[ast.Name() | ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _takes_place(node: ast.AST, left: str, right: str) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=held, attr="append"), args=[value]):
            return text_of(value) == left and text_of(held) in right  # if score > min(kept): kept.append(score)
        case ast.Call(func=function, args=[held, value]) if last_name(function) in (
            "heappush",
            "insort",
            "heapreplace",
        ):
            return left in text_of(value) and text_of(held) in right
    if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Constant):
        return False
    pairs = [(node.targets[0], node.value)]
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
            pairs = list(zip(targets, values, strict=False))
    return any({text_of(target), text_of(value)} == {left, right} for target, value in pairs)
