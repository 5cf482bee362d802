"""Where a value comes from: names, parameters, returns and attributes followed back to the calls that made it."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import callee, chosen, given_back
from lockstep.commands.lint.ddp import asks_for_wrapper, is_ddp, is_wrapper
from lockstep.commands.lint.filled import filled_elsewhere
from lockstep.commands.lint.owners import kinds
from lockstep.commands.lint.parts import entries, members, of_self, turns
from lockstep.commands.lint.pieces import at, cut, number
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import holding, last_above, reaching
from lockstep.commands.lint.results import returns, yielded
from lockstep.commands.lint.sites import argument, default, sites
from lockstep.commands.lint.source import Binding, Function
from lockstep.commands.lint.tree import text_of, walk
from lockstep.commands.lint.ways import exported

DEPTH = 14  # names, calls and returns followed in a row
_BEGUN: list[ast.AST] = []  # stands for the origins of what is being followed: a circle adds nothing


def origins(program: Program, node: ast.AST, depth: int = 0) -> list[ast.AST]:
    """The expressions that a value may come from: calls, constants, and what can't be followed, as it stands."""
    known = program.made.get(node)
    if known is not None:
        program.cuts += known is _BEGUN
        return known
    if not _goes_on(program, depth - 1):
        return [node]
    program.made[node], before = _BEGUN, program.cuts
    found = list(dict.fromkeys(_origins(program, node, depth)))
    if depth == 0 or program.cuts == before:
        program.made[node] = found
    else:
        del program.made[node]
    return found


def _goes_on(program: Program, depth: int) -> bool:
    """Whether a value is followed further; where not, what comes of it holds for this way alone."""
    program.cuts += depth >= DEPTH
    return depth < DEPTH


def _origins(program: Program, node: ast.AST, depth: int) -> Iterator[ast.AST]:
    match node:
        case ast.Name():
            yield from _of_name(program, node, depth)
        case ast.Attribute():
            yield from _of_attribute(program, node, depth)
        case ast.IfExp(test=test, body=body, orelse=other):
            yield from origins(program, body, depth + 1)
            left = origins(program, other, depth + 1)
            yield from (each for each in left if not (asks_for_wrapper(test) and is_wrapper(program, each)))
        case ast.NamedExpr(value=value) | ast.Await(value=value):
            yield from origins(program, value, depth + 1)
        case ast.BoolOp(values=values):
            for value in values:
                yield from origins(program, value, depth + 1)
        case ast.Call():
            yield from _of_call(program, node, (), depth)
        case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as index)):
            yield from _entry(program, node, value, index, depth)
        case ast.Subscript(value=value, slice=ast.UnaryOp() as index) if (place := number(index)) is not None:
            yield from _entry(program, node, value, place, depth)
        case ast.Subscript(value=value, slice=ast.Slice() as piece):
            yield from (cut(program, made, piece) or node for made in origins(program, value, depth + 1))
        case ast.Subscript(value=value, slice=ast.Name()):
            made = [each for each in origins(program, value, depth + 1) if isinstance(each, ast.DictComp)]
            for each in made:  # all entries are made by one expression
                yield from origins(program, each.value, depth + 1)
            known = [] if made else last_above(program.owner.get(node), node)
            for binding in known:
                yield from _along(program, binding.value or node, binding.path, depth)
            if not made and not known:
                yield node
        case _:
            yield node


def _entry(
    program: Program, node: ast.AST, holder: ast.expr, index: str | int, depth: int, place: tuple[int, ...] = ()
) -> Iterator[ast.AST]:
    """An entry of a dictionary or a tuple that is written out, and of that what stands at a place."""
    held = origins(program, holder, depth + 1)
    known = [each for made in held for each in entries(program, made, index)]
    if not known:
        known = [
            each
            for made in held
            for each in filled_elsewhere(program, made, index, lambda n: origins(program, n, depth))
        ]
    for entry, path in known:
        yield from _along(program, entry, (*path, *place), depth)
    if not known:
        yield node


def _of_name(program: Program, node: ast.Name, depth: int) -> Iterator[ast.AST]:
    found = bindings(program, node, node.id)
    if not found:
        yield node
    for binding in reaching(program, node, found):
        match binding.kind:
            case "value" | "with":
                assert binding.value is not None
                yield from _along(program, binding.value, binding.path, depth)
            case "item":
                yield from _of_item(program, binding, depth)
            case "param":
                yield from _of_parameter(program, node, binding, depth)
            case "import":
                yield from _imported(program, node, depth)
            case _:
                yield binding.node


def _of_item(program: Program, binding: Binding, depth: int) -> Iterator[ast.AST]:
    """What a loop takes one after the other from a tuple, a list or a dictionary; else the loop itself."""
    parts = turns(binding.value, binding.path, lambda node: origins(program, node, depth + 1)) if binding.value else ()
    found = [made for part, path in parts for made in _along(program, part, path, depth)]
    yield from found or [binding.node]


def _imported(program: Program, node: ast.Name, depth: int) -> Iterator[ast.AST]:
    """A value that another local file's top binds."""
    for binding in bindings(program, node, node.id):
        for each in exported(program, binding, program.owner[node]):
            if each.kind == "value" and each.value is not None:
                yield from _along(program, each.value, each.path, depth)
                return
    yield node


def _of_parameter(program: Program, node: ast.Name, binding: Binding, depth: int) -> Iterator[ast.AST]:
    function = program.owner[binding.node].scopes[binding.node]
    if not isinstance(function, Function):
        yield binding.node
        return
    known = sites(program, function)
    given = 0
    for site in known:
        value = argument(site, node.id) or default(function, node.id)
        if value is not None:
            given += 1
            yield from origins(program, value, depth + 1)
    if given < max(1, len(known)):
        yield binding.node


def _along(program: Program, value: ast.AST, path: tuple[int, ...], depth: int) -> Iterator[ast.AST]:
    """The origins of what stands at a place of a tuple."""
    if not path:
        yield from origins(program, value, depth + 1)
        return
    match value:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if (part := at(parts, path[0])) is not None:
            yield from _along(program, part, path[1:], depth + 1)
        case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part):  # all of them are made by one expression
            yield from _along(program, part, path[1:], depth + 1)
        case ast.IfExp(body=body, orelse=other):
            yield from _along(program, body, path, depth + 1)
            yield from _along(program, other, path, depth + 1)
        case ast.Call():
            yield from _of_call(program, value, path, depth)
        case ast.Name() | ast.Attribute() | ast.Subscript() if _goes_on(program, depth):
            for made in origins(program, value, depth + 1):
                if isinstance(made, ast.Tuple | ast.List | ast.ListComp | ast.GeneratorExp):
                    yield from _along(program, made, path, depth + 1)
                elif not (isinstance(made, ast.Call) and last_name(made.func) == "DataLoader"):  # which has no parts
                    yield made
        case _:
            yield value


def _of_attribute(program: Program, node: ast.Attribute, depth: int) -> Iterator[ast.AST]:
    source = program.owner[node]
    text = text_of(node)
    found = source.attributes.get(text, [])
    if text.startswith("self."):
        own = class_of(source, node)
        found = of_self(program, own, text) if own is not None else []
    found = [each for each in found if node not in walk(each.node)] if len(found) < 8 else found
    if not found:
        yield from _of_owner(program, node, depth)
        return
    same = [each for each in found if function_of(source, each.node) is function_of(source, node)]
    for binding in holding(program, same or found, node):
        if binding.kind in ("value", "with") and binding.value is not None:
            yield from _along(program, binding.value, binding.path, depth)
        else:
            yield binding.node


def _of_owner(program: Program, node: ast.Attribute, depth: int) -> Iterator[ast.AST]:
    """What an attribute is by the object that it is read from: a wrapped model, a local class's, a dataclass's."""
    owners: list[ast.AST] = origins(program, node.value, depth + 1) if _goes_on(program, depth) else []
    own = class_of(program.owner[node], node)
    if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and own is not None:
        owners = [own]  # a class's own names
    elif node.attr == "module":  # of a wrapper
        for made in owners:
            yield from _inner(program, made, depth) or [node]
        return
    owners = [kind for made in owners for kind in (kinds(program, made) if isinstance(made, ast.arg) else [made])]
    known = [part for made in owners for part in members(program, made, node.attr)]
    for value, path in known:
        yield from _along(program, value, path, depth)
    if not known:
        yield node


def _inner(program: Program, made: ast.AST, depth: int) -> list[ast.AST]:
    """What a wrapper holds; nothing for another object."""
    held_one = isinstance(made, ast.Call) and is_ddp(program, made) and made.args
    return origins(program, held_one[0], depth + 1) if held_one else []


def _of_call(program: Program, call: ast.Call, path: tuple[int, ...], depth: int) -> Iterator[ast.AST]:
    function, name = callee(program, call), last_name(call.func)
    if function is None and (several := chosen(program, call)) and _goes_on(program, depth):
        values = [each for one in several for each in returns(program, one) if each is not None]
        for value in values:
            yield from _along(program, value, path, depth + 1)
        yield from [] if values else [call]
        return
    if function is not None and function.name != "__init__" and _goes_on(program, depth):
        returned = [each for each in returns(program, function) if each is not None]
        for value in returned:
            yield from _along(program, value, path, depth + 1)
        managed = any(last_name(each) == "contextmanager" for each in function.decorator_list)
        for value in yielded(program, function) if managed else []:
            yield from _along(program, value, path, depth + 1)
        if not returned and not managed:
            yield call
        return
    if name == "get" and len(call.args) in (1, 2) and isinstance(call.func, ast.Attribute):
        key = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
        holder = call.func.value
        yield from _entry(program, call, holder, key, depth, path) if isinstance(key, str) else [call]
        return
    if name == "getattr" and len(call.args) == 3 and getattr(call.args[1], "value", None) == "module":
        for made in origins(program, call.args[0], depth + 1):
            yield from _inner(program, made, depth) or [made]
        return
    inner = given_back(program, call, path)
    yield from [call] if inner is None else origins(program, inner, depth + 1)
