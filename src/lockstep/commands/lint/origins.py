"""Where a value comes from: names, parameters, returns and attributes followed back to the calls that made it."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import argument, callee, default, definition, sites
from lockstep.commands.lint.parts import entries, members, of_self, returns, yielded
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import holding, reaching
from lockstep.commands.lint.source import Binding, Function, class_of, function_of
from lockstep.commands.lint.words import PREPARE, SAME

DEPTH = 14  # names, calls and returns followed in a row


def origins(program: Program, node: ast.AST, depth: int = 0) -> list[ast.AST]:
    """The expressions that a value may come from: calls, constants, and what can't be followed, as it stands."""
    key = ("origins", node)
    if key in program.memo:
        known = program.memo[key]
        assert isinstance(known, list)
        return known
    if depth > DEPTH:
        return [node]
    program.memo[key] = []  # a circle adds nothing
    found = list(dict.fromkeys(_origins(program, node, depth)))
    if depth == 0:
        program.memo[key] = found
    else:
        del program.memo[key]
    return found


def _origins(program: Program, node: ast.AST, depth: int) -> Iterator[ast.AST]:
    match node:
        case ast.Name():
            yield from _of_name(program, node, depth)
        case ast.Attribute():
            yield from _of_attribute(program, node, depth)
        case ast.IfExp(body=body, orelse=other):
            yield from origins(program, body, depth + 1)
            yield from origins(program, other, depth + 1)
        case ast.NamedExpr(value=value) | ast.Await(value=value):
            yield from origins(program, value, depth + 1)
        case ast.BoolOp(values=values):
            for value in values:
                yield from origins(program, value, depth + 1)
        case ast.Call():
            yield from _of_call(program, node, (), depth)
        case ast.Subscript(value=value, slice=ast.Constant(value=str() | int() as index)):
            yield from _subscript(program, node, value, index, depth)
        case _:
            yield node


def _subscript(program: Program, node: ast.AST, value: ast.expr, index: str | int, depth: int) -> Iterator[ast.AST]:
    """An entry of a dictionary or a tuple that is written out."""
    known = [each for made in origins(program, value, depth + 1) for each in entries(program, made, index)]
    for entry, path in known:
        yield from _along(program, entry, path, depth)
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
    """An element of a tuple or a list that is written out, one after the other; else the loop itself."""
    written = binding.value
    if isinstance(written, ast.Tuple | ast.List) and 0 < len(written.elts) < 8:
        for each in written.elts:
            yield from _along(program, each, binding.path, depth)
        return
    yield binding.node


def _imported(program: Program, node: ast.Name, depth: int) -> Iterator[ast.AST]:
    """A value that another local file's top binds."""
    source = program.owner[node]
    for binding in bindings(program, node, node.id):
        name = binding.target.partition(":")[2]
        for other in program.sources:
            if name and other is not source and other.path.stem == binding.target.partition(":")[0].rpartition(".")[2]:
                for each in other.names.get(other.tree, {}).get(name, []):
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
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if path[0] < len(parts):
            yield from _along(program, parts[path[0]], path[1:], depth + 1)
        case ast.IfExp(body=body, orelse=other):
            yield from _along(program, body, path, depth + 1)
            yield from _along(program, other, path, depth + 1)
        case ast.Call():
            yield from _of_call(program, value, path, depth)
        case ast.Name() if depth < DEPTH:
            for made in origins(program, value, depth + 1):
                if isinstance(made, ast.Tuple | ast.List) and path[0] < len(made.elts):
                    yield from _along(program, made.elts[path[0]], path[1:], depth + 1)
                elif not (isinstance(made, ast.Call) and last_name(made.func) == "DataLoader"):  # which has no parts
                    yield made
        case _:
            yield value


def _of_attribute(program: Program, node: ast.Attribute, depth: int) -> Iterator[ast.AST]:
    source = program.owner[node]
    text = ast.unparse(node)
    found = source.attributes.get(text, [])
    if text.startswith("self."):
        own = class_of(source, node)
        found = of_self(program, own, text) if own is not None else []
    found = [each for each in found if node not in ast.walk(each.node)] if len(found) < 8 else found
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
    owners: list[ast.AST] = origins(program, node.value, depth + 1) if depth < DEPTH else []
    own = class_of(program.owner[node], node)
    if isinstance(node.value, ast.Name) and node.value.id == "self" and own is not None:
        owners = [own]  # a class's own names
    elif node.attr == "module":
        for made in owners:
            inner = isinstance(made, ast.Call) and is_ddp(program, made) and made.args
            yield from origins(program, inner[0], depth + 1) if inner else [node]
        return
    known = [part for made in owners for part in members(program, made, node.attr)]
    for value, path in known:
        yield from _along(program, value, path, depth)
    if not known:
        yield node


def _of_call(program: Program, call: ast.Call, path: tuple[int, ...], depth: int) -> Iterator[ast.AST]:
    function, name = callee(program, call), last_name(call.func)
    if function is not None and function.name != "__init__" and depth < DEPTH:
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
        yield from _got(program, call, path, depth)
        return
    if name in PREPARE and call.args and isinstance(call.func, ast.Attribute):
        place = path[0] if path else 0
        if place < len(call.args) and (path or len(call.args) == 1):
            yield from origins(program, call.args[place], depth + 1)
            return
    if name in SAME and not path:
        method = isinstance(call.func, ast.Attribute) and not qualified(program, call.func)
        inner = call.func.value if method and isinstance(call.func, ast.Attribute) else next(iter(call.args), None)
        if inner is not None and not isinstance(inner, ast.Starred):
            yield from origins(program, inner, depth + 1)
            return
    yield call


def _got(program: Program, call: ast.Call, path: tuple[int, ...], depth: int) -> Iterator[ast.AST]:
    """`settings.get("train", other)` of a dictionary that is written out."""
    key = call.args[0]
    assert isinstance(call.func, ast.Attribute)
    if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
        yield call
        return
    made = origins(program, call.func.value, depth + 1)
    known = [(value, [*inner, *path]) for each in made for value, inner in entries(program, each, key.value)]
    for value, place in known:
        yield from _along(program, value, tuple(place), depth)
    if not known:
        yield call


def is_ddp(program: Program, call: ast.Call) -> bool:
    """Whether a call is DistributedDataParallel's, by whatever name it was imported."""
    return qualified(program, call.func).endswith(".DistributedDataParallel")


def made_by(program: Program, node: ast.AST, *names: str) -> list[ast.Call]:
    """The calls of a library's function or class of one of these names that a value comes from."""
    calls = [each for each in origins(program, node) if isinstance(each, ast.Call)]
    return [each for each in calls if last_name(each.func) in names and definition(program, each.func) is None]
