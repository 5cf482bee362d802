"""Which of two ranks a condition lets in: it is worked out for rank 0 and for rank 1 of a run of several processes."""

import ast
import re

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_first, is_world, rank_like
from lockstep.commands.lint.source import Function

_SEVERAL = re.compile(r"^(is_)?(use_)?(ddp|distributed|is_initialized|is_available|multi_?gpu|is_dist)(_\w+)?$")


def splits(program: Program, test: ast.expr) -> bool:
    """Whether a condition lets rank 0 in and keeps rank 1 out, or the other way round, when they reach it together."""
    first, second = lets_in(program, test, 0), lets_in(program, test, 1)
    return first is not second and False in (first, second)


def lets_in(program: Program, test: ast.expr, rank: int, depth: int = 0) -> bool | None:
    """What a condition is on a rank (0 or 1) where several processes run; None where that can't be told."""
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = lets_in(program, inner, rank, depth)
            return None if found is None else not found
        case ast.BoolOp(op=op, values=values):
            stops = isinstance(op, ast.Or)
            parts = [lets_in(program, each, rank, depth) for each in values]
            return stops if stops in parts else None if None in parts else not stops
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(program, left, op, right, rank)
        case ast.Name() | ast.Attribute() | ast.Subscript():
            return _named(program, test, rank, depth)
        case ast.Call(func=function):
            name = last_name(function).lower()
            if is_first(name):
                return rank == 0
            local = callee(program, test) if depth < 4 else None
            if local is not None:
                values = [each.value for each in ast.walk(local) if isinstance(each, ast.Return) and each.value]
                return next((lets_in(program, one, rank, depth + 1) for one in values if splits(program, one)), None)
            if _SEVERAL.search(name):
                return True
            return bool(rank) if rank_like(program, test) else None
    return None


def _named(program: Program, test: ast.Name | ast.Attribute | ast.Subscript, rank: int, depth: int) -> bool | None:
    name = last_name(test).lower()
    if isinstance(definition(program, test), Function):
        return True  # the function itself
    if is_first(name):
        return rank == 0
    if rank_like(program, test):
        return bool(rank)
    made = [each for each in origins(program, test) if isinstance(each, ast.expr)] if depth < 4 else []
    found = {lets_in(program, each, rank, depth + 1) for each in made if each is not test}
    if len(found) == 1 and len(made) == 1:
        return found.pop()
    return True if _SEVERAL.search(name) else None


def _compared(program: Program, left: ast.expr, op: ast.cmpop, right: ast.expr, rank: int) -> bool | None:
    if isinstance(left, ast.Constant) and not isinstance(right, ast.Constant):
        turned = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
        return _compared(program, right, turned.get(type(op), type(op))(), left, rank)
    mine = _value(program, left, rank)
    if mine is None:
        return None
    if isinstance(right, ast.Tuple | ast.List | ast.Set) and isinstance(op, ast.In | ast.NotIn):
        others = [_value(program, each, rank) for each in right.elts]
        return None if None in others else (mine in others) is isinstance(op, ast.In)
    other = _value(program, right, rank)
    if isinstance(op, ast.Is | ast.IsNot):
        return isinstance(op, ast.IsNot)  # a rank is not None
    if other is None:
        alone = isinstance(op, ast.Eq | ast.NotEq) and not is_world(left)
        return (rank == 0) is isinstance(op, ast.Eq) if alone else None  # `rank == args.writer`: one of them
    match op:
        case ast.Eq():
            return mine == other
        case ast.NotEq():
            return mine != other
        case ast.Lt():
            return mine < other
        case ast.LtE():
            return mine <= other
        case ast.Gt():
            return mine > other
        case ast.GtE():
            return mine >= other
    return None


def _value(program: Program, node: ast.expr, rank: int) -> int | None:
    """A rank's number, the number of processes, or what is written out."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case ast.BinOp(left=left, op=ast.Mod()):
            return _value(program, left, rank)  # of the first machine
    if is_world(node):
        return 2
    return rank if rank_like(program, node) else None
