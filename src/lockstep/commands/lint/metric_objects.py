"""Objects that count a metric: which calls ask them for its value, and whether they put the ranks' counts together."""

import ast

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import text_of, walk


def left_apart(program: Program, node: ast.AST) -> bool:
    """metric.compute() of a metric that was made with sync_on_compute=False."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "compute"):
        return False
    made = origins(program, node.func.value)
    return bool(made) and all(isinstance(each, ast.Call) and any(map(_off, each.keywords)) for each in made)


def _off(keyword: ast.keyword) -> bool:
    return keyword.arg == "sync_on_compute" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False


def asked(loop: Loop, nodes: list[ast.AST]) -> list[ast.AST]:
    """The calls `metric.compute()` among some nodes, of objects that a loop's passes call: `metric(outputs, y)`."""
    asking = [each for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    found = [each for each in asking if isinstance(each.func, ast.Attribute) and each.func.attr == "compute"]
    called = {text_of(each.func) for each in walk(loop) if isinstance(each, ast.Call)} if found else set()
    return [each for each in found if isinstance(each.func, ast.Attribute) and text_of(each.func.value) in called]
