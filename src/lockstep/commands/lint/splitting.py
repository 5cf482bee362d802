"""Which of two ranks a condition lets in: it is worked out for rank 0 and for rank 1 of a run of several processes."""

import ast
import re

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.ranks import is_first, is_world, rank_like
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk

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
                values = [each.value for each in walk(local) if isinstance(each, ast.Return) and each.value]
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
    if (found_there := there(program, test, rank)) is not None:
        return found_there
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
        missing = isinstance(right, ast.Constant) and right.value is None and isinstance(op, ast.Is | ast.IsNot)
        held = there(program, left, rank) if missing else None
        return None if held is None else held is isinstance(op, ast.IsNot)
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


def there(program: Program, node: ast.expr, rank: int) -> bool | None:
    """Whether a name is bound to an object on a rank: `writer = SummaryWriter() if rank == 0 else None`."""
    key = ("there", text_of(node), program.owner[node].scopes[node], rank)
    if key not in program.memo:
        program.memo[key] = None  # a circle tells nothing
        test = _condition_of(program, node)
        program.memo[key] = lets_in(program, test, rank) if test is not None and splits(program, test) else None
    known = program.memo[key]
    return known if isinstance(known, bool) else None


def _condition_of(program: Program, node: ast.expr) -> ast.expr | None:
    """The condition under which a name, or an attribute, is bound to something, and to None otherwise."""
    source = program.owner[node]
    known = source.attributes.get(text_of(node), []) if isinstance(node, ast.Attribute) else []
    known = bindings(program, node, node.id) if isinstance(node, ast.Name) else known
    nothing = [each for each in known if isinstance(each.value, ast.Constant) and each.value.value is None]
    others = [each for each in known if each not in nothing]
    if len(others) != 1 or others[0].kind != "value" or others[0].path or len(nothing) > 1:
        return None
    match others[0].value:
        case ast.IfExp(test=test, orelse=ast.Constant(value=None)):
            return test
    outer = source.parents.get(others[0].node)
    within = nothing and isinstance(outer, ast.If) and others[0].node in outer.body
    return outer.test if within and isinstance(outer, ast.If) else None


def asks_for_object(program: Program, test: ast.expr) -> bool:
    """`if writer is not None:`, `if writer:`, where one rank alone has such an object."""
    match test:
        case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
            test = left
    if not isinstance(test, ast.Name | ast.Attribute):
        return False
    return {there(program, test, 0), there(program, test, 1)} == {True, False}


def left_by_some(program: Program, leaves: ast.Break) -> ast.For | ast.While | None:
    """The loop that a break ends on some ranks alone: under a rank's condition, whose other ranks go on."""
    source, inner, divided = program.owner[leaves], leaves, False
    node: ast.AST = inner
    for outer in above(source, leaves):
        if isinstance(outer, ast.For | ast.While):
            return outer if divided and node in outer.body else None
        if isinstance(outer, ast.If) and splits(program, outer.test):
            other = outer.orelse if node in outer.body else outer.body
            divided = not any(
                isinstance(each, ast.Break | ast.Return | ast.Raise) for part in other for each in walk(part)
            )
            if not divided:
                return None
        if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
            return None
        node = outer
    return None
