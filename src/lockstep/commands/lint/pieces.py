"""Pieces of tuples and lists that are written out: what stands at an index, at a slice, behind a star."""

import ast
from collections.abc import Sequence
from typing import TypeVar

from lockstep.commands.lint.program import Program

_Part = TypeVar("_Part")


def number(node: ast.AST | None) -> int | None:
    """An index that is written out: 1, or -1."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    return None


def at(parts: Sequence[_Part], place: int) -> _Part | None:
    """What stands at a place, from the end for one below 0; None where there is none."""
    return parts[place] if -len(parts) <= place < len(parts) else None


def of_field(value: ast.AST) -> ast.AST:
    """What a dataclass's field holds by default: of field(default=x) and field(default_factory=lambda: x) the x."""
    match value:
        case ast.Call(func=ast.Name(id="field") | ast.Attribute(attr="field"), keywords=keywords):
            for each in keywords:
                if each.arg == "default":
                    return each.value
                if each.arg == "default_factory" and isinstance(each.value, ast.Lambda):
                    return each.value.body
    return value


def cut(program: Program, made: ast.AST, piece: ast.Slice) -> ast.Tuple | None:
    """The tuple that `[1:]` makes of one that is written out; the same node each time that it is asked for."""
    if not isinstance(made, ast.Tuple | ast.List) or any(isinstance(each, ast.Starred) for each in made.elts):
        return None
    first, last = number(piece.lower), number(piece.upper)
    told = (first is None) is (piece.lower is None) and (last is None) is (piece.upper is None) and piece.step is None
    source = program.owner.get(made)
    if not told or source is None:
        return None
    key = ("cut", made, first, last)
    if key not in program.memo:
        part = ast.copy_location(ast.Tuple(made.elts[first:last], ast.Load()), made)
        source.parents[part], source.scopes[part], program.owner[part] = (
            source.parents[made],
            source.scopes[made],
            source,
        )
        program.memo[key] = part
    found: ast.Tuple = program.memo[key]
    return found
