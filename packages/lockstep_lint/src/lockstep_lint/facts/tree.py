"""Small questions about a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def last_name(node: ast.AST | None) -> str:
    """The last part of a name: `step` of `self.optimizer.step`, and of a call to it; empty where there is none."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return last_name(node.value) if isinstance(node, ast.Subscript) else ""


def dotted_name(node: ast.AST) -> str:
    """A name as written: `torch.distributed`; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def receiver(call: ast.Call) -> ast.expr | None:
    """The object whose method is called."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((each.value for each in call.keywords if each.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """The value of an argument that is given by position or by keyword."""
    if position < len(call.args) and not any(isinstance(each, ast.Starred) for each in call.args[: position + 1]):
        return call.args[position]
    return keyword(call, name)


def literal(node: ast.AST | None) -> object:
    """The value of a constant, else None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, (int, float)) else None
    return node.value if isinstance(node, ast.Constant) else None


def words(*nodes: ast.AST | None) -> frozenset[str]:
    """The names and texts that stand below nodes."""
    found: set[str] = set()
    for node in nodes:
        for each in ast.walk(node) if node is not None else ():
            match each:
                case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str() as word):
                    found.add(word)
                case ast.keyword(arg=str() as word):
                    found.add(word)
    return frozenset(found)


def walk_calls(node: ast.AST) -> Iterator[ast.Call]:
    """All calls below a node, itself among them."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            yield each


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes right below a node, without load and store marks."""
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            for each in value:
                if isinstance(each, ast.AST):
                    yield each
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            yield value


def place(node: ast.AST) -> tuple[int, int]:
    """Line from 1 and column from 0."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def within(node: ast.AST, above: ast.AST) -> bool:
    """Whether a node of the same file stands within another, by their places."""
    end = (getattr(above, "end_lineno", None) or 1 << 30, getattr(above, "end_col_offset", None) or 1 << 30)
    return place(above) <= place(node) < end


def parts(value: ast.expr | None) -> Iterator[ast.expr]:
    """The elements of a display, the two sides of a conditional expression, or the expression itself."""
    match value:
        case None:
            return
        case ast.Dict(values=elements) | ast.List(elts=elements) | ast.Tuple(elts=elements):
            yield from elements
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case _:
            yield value


def ends(block: list[ast.stmt]) -> bool:
    """Whether a block leaves its function, its loop or the process."""
    last = block[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return dotted_name(last.value.func) in ("sys.exit", "exit", "os._exit", "quit")
    return isinstance(last, (ast.Return, ast.Continue, ast.Break))
