"""Functions called by another name: partials, closures that a factory returns, what is handed in, callbacks' hooks."""

import ast
import re
from collections.abc import Callable

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.source import Binding, Function, parameters
from lockstep.commands.lint.tree import text_of, walk

_Meaning = Function | ast.ClassDef | None
_HOOK = re.compile(r"(on|before|after)_\w+$")
Define = Callable[[Program, ast.AST], _Meaning]


def filled(call: ast.Call) -> tuple[list[ast.expr], list[ast.keyword]]:
    """The arguments that a partial has already: `make(data)` after `make = partial(DataLoader, batch_size=32)`."""
    made = call.func.__dict__.get("filled")
    return (list(made.args[1:]), list(made.keywords)) if isinstance(made, ast.Call) else ([], [])


def by_value(program: Program, node: ast.AST, define: Define) -> _Meaning:
    """What a name is bound to once: another function's name, a function that a local one makes, one handed in.

    `define`: what a name means by itself.
    """
    if not isinstance(node, ast.Name | ast.Attribute) or node not in program.owner:
        return None
    key = ("by_value", node)
    if key not in program.memo:
        program.memo[key] = None  # a circle means nothing
        program.memo[key] = _by_value(program, node, define)
    found = program.memo[key]
    assert found is None or isinstance(found, Function | ast.ClassDef)
    return found


def _by_value(program: Program, node: ast.Name | ast.Attribute, define: Define) -> _Meaning:
    match _only(program, node):
        case Binding(kind="param", node=ast.arg() as parameter, path=()):
            return _handed_in(program, parameter, define)
        case Binding(kind="value", value=ast.Name() as name, path=()):
            return _function(define(program, name))
        case Binding(kind="value", value=ast.Call(func=maker), path=()):
            found = define(program, maker)
            return made_inside(program, found) if isinstance(found, Function) else None
    return None


def _only(program: Program, node: ast.Name | ast.Attribute) -> Binding | None:
    if isinstance(node, ast.Name):
        found = bindings(program, node, node.id)
    else:
        found = program.owner[node].attributes.get(text_of(node), [])
    return found[0] if len(found) == 1 else None


def table(program: Program, holder: ast.AST) -> ast.Dict | None:
    """The dictionary that is written out, here or where a name is bound once."""
    only = _only(program, holder) if isinstance(holder, ast.Name | ast.Attribute) else None
    made = only.value if only is not None and only.kind == "value" and not only.path else holder
    return made if isinstance(made, ast.Dict) else None


def _function(found: _Meaning) -> Function | None:
    return found if isinstance(found, Function) else None


def hooks(program: Program, call: ast.Call, called: Function | None) -> list[tuple[Function, list[ast.expr]]]:
    """The callbacks' methods that `each.on_epoch_end(run)` may run, or `self.tell("on_epoch_end", run)`.

    With what they are given. `called`: the function that the call runs, which asks for a method by its name's text.
    """
    match call.func:
        case ast.Attribute(attr=name) if called is None and _HOOK.match(name):
            return [(each, list(call.args)) for each in program.methods.get(name, [])]
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [(each, list(call.args)) for each in program.methods.get(name, [])]
    found = list[tuple[Function, list[ast.expr]]]()
    names = [each.arg for each in parameters(called)] if called is not None else []
    for what, inner in _asked(program, called) if called is not None else []:
        before = int(names[0] == "self")
        place = names.index(what) - before
        text = call.args[place] if 0 <= place < len(call.args) else None
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            given = list[ast.expr]()
            for each in inner.args:
                given += call.args[len(names) - before :] if isinstance(each, ast.Starred) else [each]
            found += [(each, given) for each in program.methods.get(text.value, [])]
    return found


@remembered
def _asked(_: Program, function: Function) -> list[tuple[str, ast.Call]]:
    """The parameters by whose text a function calls methods: `getattr(each, what)(self, *args)`."""
    names, found = {each.arg for each in parameters(function)}, list[tuple[str, ast.Call]]()
    for node in walk(function):
        match node:
            case ast.Call(func=ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Name(id=what), *_])) if what in names:
                found.append((what, node))
    return found


def made_inside(program: Program, maker: Function) -> Function | None:
    """The inner function that a function returns on all ways."""
    source, found = program.owner[maker], set[ast.AST | None]()
    for node in walk(maker):
        if isinstance(node, ast.Return) and function_of(source, node) is maker:
            known = source.names.get(maker, {}).get(node.value.id, []) if isinstance(node.value, ast.Name) else []
            found |= {each.value if each.kind == "def" else None for each in known} or {None}
    inner = found.pop() if len(found) == 1 else None
    return inner if isinstance(inner, Function) else None


def _handed_in(program: Program, parameter: ast.arg, define: Define) -> Function | None:
    """The function that all callers give for a parameter of a plain function."""
    owner = program.owner[parameter].scopes[parameter]
    if not isinstance(owner, Function) or isinstance(program.owner[owner].parents[owner], ast.ClassDef):
        return None
    found = set[ast.AST | None]()
    for call in program.named.get(owner.name, []):
        if define(program, call.func) is owner:
            value = given_to(call, owner, parameter.arg, 0)
            found.add(_function(define(program, value)) if isinstance(value, ast.Name) else None)
    only = found.pop() if len(found) == 1 else None
    return only if isinstance(only, Function) else None


def given_to(call: ast.Call, function: Function, parameter: str, before: int) -> ast.expr | None:
    """What a call gives for a parameter of the function that it runs; `before`: those that the call fills itself."""
    named = next((each.value for each in call.keywords if each.arg == parameter), None)
    place = [each.arg for each in parameters(function)].index(parameter) - before
    straight = not any(isinstance(each, ast.Starred) for each in call.args)
    return named or (call.args[place] if straight and 0 <= place < len(call.args) else None)


def element_of(program: Program, holder: ast.AST, define: Define) -> ast.ClassDef | None:
    """The local class of what a dictionary or a list holds: defaultdict(Meter), {name: Meter() for ...}, [A(), A()]."""
    if not isinstance(holder, ast.Name | ast.Attribute):
        return None
    made = list[ast.AST]()
    match _only(program, holder):
        case Binding(kind="value", value=ast.Call(func=function, args=[maker]), path=()):
            made = [maker] if last_name(function) == "defaultdict" else []
        case Binding(kind="value", value=ast.DictComp(value=ast.Call(func=maker)), path=()):
            made = [maker]
        case Binding(kind="value", value=ast.ListComp(elt=ast.Call(func=maker)), path=()):
            made = [maker]
        case Binding(kind="value", value=ast.Dict(values=parts) | ast.List(elts=parts), path=()):
            made = [each.func if isinstance(each, ast.Call) else each for each in parts]
    found = {define(program, each) for each in made}
    only = found.pop() if len(found) == 1 else None
    return only if isinstance(only, ast.ClassDef) else None


def of_item(program: Program, found: list[Binding], define: Define) -> ast.ClassDef | None:
    """The local class of `each` in `for name, each in meters.items()`."""
    only = found[0] if len(found) == 1 and found[0].kind == "item" else None
    match only.value if only is not None else None:
        case ast.Call(func=ast.Attribute(value=holder, attr=name), args=[]):
            place = {"values": (), "items": (1,)}.get(name)
            return element_of(program, holder, define) if only is not None and only.path == place else None
        case ast.Name() | ast.Attribute() as holder if only is not None and not only.path:
            return element_of(program, holder, define)
    return None
