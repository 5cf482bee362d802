"""What stands around a node of a file: its function, its class, its statement and those after it."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.source import Function, Source


def above(source: Source, node: ast.AST) -> Iterator[ast.AST]:
    """Those that a node stands in, from the inside out, to the module."""
    while (parent := source.parents.get(node)) is not None:
        yield parent
        node = parent


def function_of(source: Source, node: ast.AST) -> Function | None:
    """The function that a node stands in."""
    scope = source.scopes.get(node)
    while scope is not None and not isinstance(scope, Function):
        scope = source.scopes[scope] if scope is not source.tree else None
    return scope


def class_of(source: Source, node: ast.AST) -> ast.ClassDef | None:
    """The class that a node stands in."""
    scope = source.scopes.get(node)
    while scope is not None and not isinstance(scope, ast.ClassDef):
        scope = source.scopes[scope] if scope is not source.tree else None
    return scope


def statement_of(source: Source, node: ast.AST) -> ast.stmt:
    """The statement that a node is part of, or is."""
    while not isinstance(node, ast.stmt):
        node = source.parents[node]
    return node


def following(source: Source, node: ast.stmt) -> list[ast.stmt]:
    """The statements after one in its own block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(source.parents[node], name, None)
        if isinstance(block, list) and node in block:
            return block[block.index(node) + 1 :]
    return []
