"""Who calls whom: the local functions behind calls, and where each is started."""

import ast

from lockstep.commands.lint.aliases import by_value, hooks, table
from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.objects import bases, class_behind
from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.words import COMMON, PREPARE, SAME


@remembered
def definition(program: Program, node: ast.AST) -> Function | ast.ClassDef | None:
    """The local function or class that a name means."""
    path, colon, name = qualified(program, node).partition(":")
    if not colon:
        return _cls(program, node) or by_value(program, node, definition)
    source = program.named_files.get(path)
    name, _, inner = name.partition(".")
    for binding in source.names.get(source.tree, {}).get(name, []) if source else []:
        if inner and isinstance(binding.value, ast.ClassDef):
            return method(program, binding.value, inner)  # Class.method
        if isinstance(binding.value, Function | ast.ClassDef):
            return None if inner else binding.value
    for binding in bindings(program, node, name) if node in program.owner else []:
        if isinstance(binding.value, Function | ast.ClassDef):
            return binding.value
    return None


def _cls(program: Program, node: ast.AST) -> ast.ClassDef | None:
    """The class that `cls` is in its own methods."""
    if not (isinstance(node, ast.Name) and node.id == "cls" and node in program.owner):
        return None
    inner = function_of(program.owner[node], node)
    given = inner is not None and any(last_name(each) == "classmethod" for each in inner.decorator_list)
    return class_of(program.owner[node], node) if given else None


def method(program: Program, owner: ast.ClassDef, name: str, depth: int = 0) -> Function | None:
    """A local class's method, its own or a local base's."""
    for node in owner.body:
        if isinstance(node, Function) and node.name == name:
            return node
    for base in owner.bases if depth < 5 else []:
        above = definition(program, base)
        if isinstance(above, ast.ClassDef) and (found := method(program, above, name, depth + 1)):
            return found
    return None


@remembered
def lineage(program: Program, owner: ast.ClassDef) -> list[ast.ClassDef]:
    """A local class and its local bases, in the order in which Python asks them (depth first)."""
    return bases(program, owner, definition)


@remembered
def _children(program: Program) -> dict[ast.ClassDef, list[ast.ClassDef]]:
    found: dict[ast.ClassDef, list[ast.ClassDef]] = {}
    for source in program.sources:
        for node in source.of(ast.ClassDef):
            for base in node.bases:
                above = definition(program, base)
                if isinstance(above, ast.ClassDef):
                    found.setdefault(above, []).append(node)
    return found


def descendants(program: Program, owner: ast.ClassDef) -> list[ast.ClassDef]:
    """The local classes that a local class is a base of, near or far."""
    found, waiting, known = list[ast.ClassDef](), [owner], _children(program)
    while waiting:
        for each in known.get(waiting.pop(0), []):
            if each not in found and each is not owner:
                found.append(each)
                waiting.append(each)
    return found


def _of_self(program: Program, own: ast.ClassDef, name: str) -> Function | None:
    """The method behind self.name(): where the class has none, or an empty one, that of the one class that fills it."""
    found = method(program, own, name)
    if found is not None and not _empty(found):
        return found
    filled = [each for one in descendants(program, own) for each in one.body if isinstance(each, Function)]
    filled = [each for each in filled if each.name == name and not _empty(each)]
    return filled[0] if len(filled) == 1 else found


def _empty(function: Function) -> bool:
    """`pass`, `...`, a docstring, raise NotImplementedError: for others to fill."""
    return all(
        isinstance(each, ast.Pass | ast.Raise) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in function.body
    )


def callee(program: Program, call: ast.Call) -> Function | None:
    """The local function that a call runs; a class's is its __init__."""
    key = ("callee", call)
    if key not in program.memo:
        program.memo[key] = _callee(program, call)
    found = program.memo[key]
    assert found is None or isinstance(found, Function)
    return found


def _callee(program: Program, call: ast.Call) -> Function | None:
    found = definition(program, call.func)
    if isinstance(found, ast.ClassDef):
        return method(program, found, "__init__")
    if found is not None:
        return found
    if "__call__" in program.methods and (owner := instance_of(program, call.func)) is not None:
        return method(program, owner, "__call__") if not isinstance(call.func, ast.Call) else None
    if isinstance(call.func, ast.Attribute):
        own = class_of(program.owner[call], call)
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "self" and own:
            return _of_self(program, own, call.func.attr)
        if own and isinstance(call.func.value, ast.Call) and last_name(call.func.value.func) == "super":
            bases = [each for each in lineage(program, own)[1:] if method(program, each, call.func.attr)]
            return method(program, bases[0], call.func.attr) if bases else None
        known = program.methods.get(call.func.attr, [])
        if known and (owner := instance_of(program, call.func.value)) is not None:
            return _of_self(program, owner, call.func.attr)
        if len(known) == 1 and call.func.attr not in COMMON and not qualified(program, call.func):
            return known[0]
    return None


@remembered
def called(program: Program, call: ast.Call) -> list[Function]:
    """The local functions that a call may run at once: one, those of a table, or the callbacks' hooks of its name."""
    found = callee(program, call)
    known = [found] if found is not None else chosen(program, call)
    return [*known, *(hook for hook, _ in hooks(program, call, found))]


@remembered
def chosen(program: Program, call: ast.Call) -> list[Function]:
    """The local functions of a table that is written out, of which a call runs one: TABLE[name](x), TABLE.get(name)(x).

    Nothing where one of its entries is anything else.
    """
    match call.func:
        case ast.Subscript(value=holder) | ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[_]):
            made = table(program, holder)
        case _:
            made = None
    found = [_entry(program, each) for each in made.values] if made is not None else []
    return list(dict.fromkeys(each for each in found if each is not None)) if None not in found else []


def _entry(program: Program, node: ast.expr) -> Function | None:
    """The local function, or the method of self, that a table's entry names."""
    found = definition(program, node)
    if found is None and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        own = class_of(program.owner[node], node) if node.value.id == "self" else None
        found = _of_self(program, own, node.attr) if own is not None else None
    return found if isinstance(found, Function) else None


def given_back(program: Program, call: ast.Call, path: tuple[int, ...]) -> ast.expr | None:
    """What a library's call hands back of what it is given: `net` of net.to(device), and of prepare(net, loader)[0]."""
    name, place = last_name(call.func), path[0] if path else 0
    method = call.func if isinstance(call.func, ast.Attribute) else None
    if name in PREPARE and method is not None and place < len(call.args) and (path or len(call.args) == 1):
        return call.args[place]
    if name not in SAME or path:
        return None
    owned = method is not None and not qualified(program, method)
    inner = method.value if owned and method is not None else next(iter(call.args), None)
    return None if isinstance(inner, ast.Starred) else inner


def lambdas(program: Program, call: ast.Call) -> list[ast.Lambda]:
    """The lambda that a name was bound to, once: `loss_of = lambda x, y: ...`."""
    name = call.func
    found = bindings(program, name, name.id) if isinstance(name, ast.Name) else []
    return [each.value for each in found if isinstance(each.value, ast.Lambda) and len(found) == 1]


def instance_of(program: Program, node: ast.AST) -> ast.ClassDef | None:
    """The local class of an object, where the name or attribute was bound to what the class returns."""
    return class_behind(program, node, definition)


def property_of(program: Program, node: ast.Attribute) -> Function | None:
    """The property of a local class's object that is read here."""
    known = [
        each
        for each in program.methods.get(node.attr, [])
        if any(last_name(mark) in ("property", "cached_property") for mark in each.decorator_list)
    ]
    owner = instance_of(program, node.value) if known else None
    found = method(program, owner, node.attr) if owner is not None else None
    return found if found in known else None
