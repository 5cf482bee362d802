"""Values followed with the arguments of each call: a factory that two calls run makes two things, not one.

`origins` tells which expressions may have made a value; here an expression comes with what its function's parameters
hold, so that `load(root, True)` and `load(root, False)` are told apart.
"""

import ast
from collections.abc import Iterator
from itertools import islice

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.parts import set_in_loops
from lockstep.commands.lint.pieces import at, cut
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.sites import argument, default, sites
from lockstep.commands.lint.source import Binding, Function
from lockstep.commands.lint.ways import MOST, Made, assigned, entered, imported, placed, within
from lockstep.commands.lint.words import PREPARE_LOADERS

_DEPTH = 32  # hops in a row


def resolve(program: Program, one: Made) -> list[Made]:
    """What may have made a value: calls of libraries and of classes, constants, and what can't be followed."""
    return list(islice(_resolve(program, one), MOST))


def _resolve(program: Program, one: Made, path: tuple[int, ...] = ()) -> Iterator[Made]:
    if len(one.trail) > _DEPTH:
        yield one
        return
    match one.node:
        case ast.Name():
            yield from _of_name(program, one, path)
        case ast.Attribute():
            yield from _of_attribute(program, one, path)
        case ast.IfExp(test=test, body=body, orelse=other):
            found = decided(program, within(one, test))
            for part in [body] * (found is not False) + [other] * (found is not True):
                yield from _resolve(program, within(one, part), path)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if path and at(parts, path[0]) is not None:
            yield from _resolve(program, within(one, parts[path[0]]), path[1:])
        case ast.Subscript(value=value, slice=ast.Slice() as piece):
            for made in _resolve(program, within(one, value)):
                rest = cut(program, made.node, piece)
                yield from [placed(one, path)] if rest is None else _resolve(program, within(made, rest), path)
        case ast.Subscript(value=value, slice=index):
            yield from _entry(program, one, value, index, path)
        case ast.Call():
            yield from _of_call(program, one, path)
        case _:
            yield placed(one, path)


def _of_name(program: Program, one: Made, path: tuple[int, ...]) -> Iterator[Made]:
    node = one.node
    assert isinstance(node, ast.Name)
    found = bindings(program, node, node.id)
    turns = [turn for outer in above(program.owner[node], node) for turn in getattr(outer, "generators", [])]
    own = [each for turn in turns for each in found if each.node is turn][:1]
    alive = own or [each for each in reaching(program, node, found) if not _dead(program, each.node, one)]
    if not alive:
        yield placed(one, path)
    for binding in alive:
        yield from _bound(program, one, binding, path)


def _bound(program: Program, one: Made, binding: Binding, path: tuple[int, ...]) -> Iterator[Made]:
    if binding.kind == "param" and binding.node in one.given:
        held = one.given[binding.node]
        yield from _resolve(program, Made(held.node, held.given, (*one.trail, one.node)), path)
    elif binding.kind == "param":
        yield from _given_somewhere(program, one, binding, path)
    elif binding.kind == "item" and binding.node in one.given and not path:
        pair = one.given[binding.node]
        yield from _resolve(program, Made(pair.node, pair.given, (*one.trail, one.node)), binding.path)
    elif binding.kind in ("value", "with") and binding.value is not None:
        yield from _resolve(program, within(one, binding.value), (*binding.path, *path))
    elif binding.kind == "import" and (value := imported(program, binding)) is not None:
        yield from _resolve(program, Made(value, {}, (*one.trail, one.node)), path)
    elif binding.kind == "item" and binding.path and not path:
        yield one  # known by its name alone
    else:
        yield placed(within(one, binding.node), path)


def _given_somewhere(program: Program, one: Made, binding: Binding, path: tuple[int, ...]) -> Iterator[Made]:
    """A parameter of a function that isn't known to be entered by one call: what any call gives."""
    function = program.owner[binding.node].scopes[binding.node]
    known = sites(program, function) if isinstance(function, Function) else []
    name = binding.node.arg if isinstance(binding.node, ast.arg) else ""
    for site in known:
        value = argument(site, name) or default(site.function, name)
        if value is not None:
            yield from _resolve(program, Made(value, {}, (*one.trail, one.node)), path)
        else:
            yield placed(within(one, binding.node), path)
    if not known:
        yield placed(within(one, binding.node), path)


def _of_attribute(program: Program, one: Made, path: tuple[int, ...]) -> Iterator[Made]:
    node = one.node
    assert isinstance(node, ast.Attribute)
    found = assigned(program, node)
    if not found:
        yield placed(one, path)
    for binding in found:
        if binding.kind in ("value", "with") and binding.value is not None:
            inside = function_of(program.owner[binding.value], binding.value)
            same = inside is function_of(program.owner[node], node)
            held = one.given if same else {}
            yield from _resolve(program, Made(binding.value, held, (*one.trail, node)), (*binding.path, *path))
        else:
            yield placed(within(one, binding.node), path)


def _entry(program: Program, one: Made, value: ast.expr, index: ast.expr, path: tuple[int, ...]) -> Iterator[Made]:
    """An entry of a dictionary, a tuple or a dictionary's comprehension that is written out."""
    wanted = constant_of(program, within(one, index))
    found = False
    for made in _resolve(program, within(one, value)):
        for entry in _entries(program, made, wanted):
            found = True
            yield from _resolve(program, entry, path)
        for given, loop, element in set_in_loops(program, made.node, wanted):
            found = True
            yield from _resolve(program, Made(given, {**made.given, loop: Made(element)}, made.trail), path)
    if not found:
        yield placed(one, path)


def _entries(program: Program, made: Made, wanted: object) -> Iterator[Made]:
    match made.node:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if key is not None and wanted is not ... and constant_of(program, within(made, key)) == wanted:
                    yield within(made, value)
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            yield from (within(made, each.value) for each in keywords if each.arg == wanted)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if isinstance(wanted, int) and wanted < len(parts):
            yield within(made, parts[wanted])
        case ast.DictComp(key=key, value=value, generators=[ast.comprehension(iter=source, ifs=[]) as turn]):
            for item in items(program, within(made, source)):
                inner = Made(made.node, {**made.given, turn: item}, made.trail)
                if wanted is not ... and constant_of(program, within(inner, key)) == wanted:
                    yield within(inner, value)


def items(program: Program, source: Made) -> Iterator[Made]:
    """What a comprehension runs over: the parts of a tuple, the pairs of a dictionary."""
    match source.node:
        case ast.Call(func=ast.Attribute(value=value, attr="items"), args=[]):
            for made in _resolve(program, within(source, value)):
                if isinstance(made.node, ast.Dict):
                    for key, each in zip(made.node.keys, made.node.values, strict=True):
                        if key is not None:
                            yield within(made, ast.Tuple([key, each], ast.Load()))
        case _:
            for made in _resolve(program, source):
                if isinstance(made.node, ast.Tuple | ast.List):
                    yield from (within(made, each) for each in made.node.elts)
                elif isinstance(made.node, ast.Dict):
                    yield from (within(made, each) for each in made.node.keys if each is not None)


def _of_call(program: Program, one: Made, path: tuple[int, ...]) -> Iterator[Made]:
    call = one.node
    assert isinstance(call, ast.Call)
    function, place = callee(program, call), path[0] if path else 0
    prepares = last_name(call.func) in PREPARE_LOADERS and isinstance(call.func, ast.Attribute)
    if function is not None and not isinstance(definition(program, call.func), ast.ClassDef):
        for site in [each for each in sites(program, function) if each.call is call]:
            inner = Made(call, entered(site, one), one.trail)
            values = list(_returned(program, function, inner))
            for value in values:
                yield from _resolve(program, within(inner, value), path)
            if values:
                return
        yield one
    elif prepares and place < len(call.args) and (path or len(call.args) == 1):
        yield from _resolve(program, within(one, call.args[place]), path[1:])
    elif last_name(call.func) in ("list", "iter", "cycle") and len(call.args) == 1 and not path:
        yield from _resolve(program, within(one, call.args[0]))
    else:
        yield placed(one, path)


def _returned(program: Program, function: Function, inner: Made) -> Iterator[ast.expr]:
    """What a call of a function may return, as far as its constants decide the conditions."""
    values = [each for each in returns(program, function) if each is not None]
    for value in sorted(values, key=lambda each: each.lineno):
        if not _dead(program, value, inner):
            yield value
            if all(found is True for found in _conditions(program, value, inner)):
                return


def _dead(program: Program, node: ast.AST, one: Made) -> bool:
    """Whether a condition around a place is decided against it."""
    return any(found is False for found in _conditions(program, node, one))


def _conditions(program: Program, node: ast.AST, one: Made) -> Iterator[bool | None]:
    """For each `if` of a place's function that it stands in: whether its branch is taken."""
    inner = node
    for outer in above(program.owner[node], node) if node in program.owner else ():
        if isinstance(outer, Function | ast.Lambda | ast.ClassDef):
            return
        if isinstance(outer, ast.If) and inner is not outer.test:
            found = decided(program, Made(outer.test, one.given, one.trail))
            yield found if found is None or inner in outer.body else not found
        elif isinstance(outer, ast.For | ast.While | ast.Try | ast.ExceptHandler):
            yield None
        inner = outer


def decided(program: Program, test: Made) -> bool | None:
    """What a condition over constants says; None where it can't be told."""
    match test.node:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = decided(program, within(test, inner))
            return None if found is None else not found
        case ast.BoolOp(op=op, values=values):
            each = [decided(program, within(test, value)) for value in values]
            decisive = isinstance(op, ast.Or)
            return decisive if decisive in each else None if None in each else not decisive
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[right]):
            one, other = constant_of(program, within(test, left)), constant_of(program, within(test, right))
            return None if ... in (one, other) else (one == other) == isinstance(op, ast.Eq)
        case ast.Name() | ast.Attribute() | ast.Constant():
            value = constant_of(program, test)
            return None if value is ... else bool(value)
    return None


def constant_of(program: Program, one: Made) -> object:
    """The constant that a value is; Ellipsis where it is none, or more than one."""
    if len(one.trail) > _DEPTH:
        return ...
    if isinstance(one.node, ast.Compare):
        found = decided(program, one)
        return ... if found is None else found
    values = [each.node.value if isinstance(each.node, ast.Constant) else ... for each in resolve(program, one)]
    return values[0] if len(values) == 1 else ...
