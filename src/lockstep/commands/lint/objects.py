"""The local class of an object: by what made it, what handed it in or returned it, whose attribute it is.

`define` in what follows: what a name means by itself, a local function or a local class.
"""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.aliases import Define, element_of, given_to, of_item
from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.source import Binding, Function
from lockstep.commands.lint.tree import text_of, walk
from lockstep.commands.lint.words import COMMON


def class_behind(program: Program, node: ast.AST, define: Define) -> ast.ClassDef | None:
    """The local class of what an expression is, where all that is known of it says the same."""
    key = ("class_behind", node)
    if key not in program.memo:
        program.memo[key] = None  # a circle means nothing
        program.memo[key] = _class_behind(program, node, define)
    found = program.memo[key]
    assert found is None or isinstance(found, ast.ClassDef)
    return found


def _class_behind(program: Program, node: ast.AST, define: Define) -> ast.ClassDef | None:
    match node:
        case ast.Name(id=name):
            found = bindings(program, node, name)
        case ast.Attribute():
            found = _of_owner(program, node, define) or program.owner[node].attributes.get(text_of(node), [])
        case ast.Call():
            return _made(program, node, define)
        case ast.Subscript(value=holder):
            return element_of(program, holder, define)
        case _:
            return None
    if (owner := of_item(program, found, define)) is not None:
        return owner
    return next((owner for each in found if (owner := _bound(program, each, define)) is not None), None)


def _bound(program: Program, binding: Binding, define: Define) -> ast.ClassDef | None:
    if binding.kind == "param" and isinstance(binding.node, ast.arg):
        return _handed_in(program, binding.node, define)
    value = binding.value if binding.kind == "value" else None
    if isinstance(value, ast.IfExp):  # Writer() if rank == 0 else None
        nothing = [isinstance(each, ast.Constant) and each.value is None for each in (value.body, value.orelse)]
        value = value.body if nothing == [False, True] else value.orelse if nothing == [True, False] else None
    for place in binding.path:  # a, b = A(), B()
        value = at(value.elts, place) if isinstance(value, ast.Tuple) else None
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if isinstance(value.func.value, ast.Call):
            value = value.func.value  # Tally().to(device)
        else:
            break
    if isinstance(value, ast.Name | ast.Attribute):
        return class_behind(program, value, define)
    return _made(program, value, define) if isinstance(value, ast.Call) else None


def _made(program: Program, call: ast.Call, define: Define) -> ast.ClassDef | None:
    """The class that is called, or that of what a local function returns."""
    maker = define(program, call.func)
    if not isinstance(maker, Function):
        return maker
    source = program.owner[maker]
    returned = [each for each in walk(maker) if isinstance(each, ast.Return) and function_of(source, each) is maker]
    found = {class_behind(program, each.value, define) if each.value is not None else None for each in returned}
    return found.pop() if len(found) == 1 else None


def _of_owner(program: Program, node: ast.Attribute, define: Define) -> list[Binding]:
    """What an attribute is bound to by the methods of its object's class: `store` of `engine.store`."""
    mine = isinstance(node.value, ast.Name) and node.value.id == "self"
    owner = class_of(program.owner[node], node) if mine else class_behind(program, node.value, define)
    for one in bases(program, owner, define) if owner is not None else ():
        home = program.owner[one]
        known = [each for each in home.attributes.get(f"self.{node.attr}", []) if class_of(home, each.node) is one]
        if known := known or home.names.get(one, {}).get(node.attr, []):
            return known
    return []


def bases(program: Program, owner: ast.ClassDef, define: Define) -> list[ast.ClassDef]:
    """A local class and its local bases, in the order in which Python asks them (depth first)."""
    found, waiting = [owner], list(owner.bases)
    while waiting and len(found) < 12:
        above = define(program, waiting.pop(0))
        if isinstance(above, ast.ClassDef) and above not in found:
            found.append(above)
            waiting[:0] = above.bases
    return found


def made_of(program: Program, define: Define) -> dict[ast.ClassDef, list[ast.Call]]:
    """The local classes that the program makes objects of, and their local bases -> the calls that do."""
    if "made_of" not in program.memo:
        found: dict[ast.ClassDef, list[ast.Call]] = {}
        for call in program.calls:
            owner = define(program, call.func)
            for each in bases(program, owner, define) if isinstance(owner, ast.ClassDef) else ():
                found.setdefault(each, []).append(call)
        program.memo["made_of"] = found
    known: dict[ast.ClassDef, list[ast.Call]] = program.memo["made_of"]
    return known


def _handed_in(program: Program, parameter: ast.arg, define: Define) -> ast.ClassDef | None:
    """The class of what all callers give for a parameter; else what its annotation says."""
    source = program.owner[parameter]
    function = source.scopes[parameter]
    if not isinstance(function, Function):
        return None
    own = source.parents[function]
    static = any(last_name(each) in ("staticmethod", "classmethod") for each in function.decorator_list)
    method = isinstance(own, ast.ClassDef) and not static
    if method and [*function.args.posonlyargs, *function.args.args][:1] == [parameter]:
        return own if isinstance(own, ast.ClassDef) else None
    found = set[ast.ClassDef | None]()
    for call in _calls(program, function, own if isinstance(own, ast.ClassDef) else None, define):
        value = given_to(call, function, parameter.arg, int(method))
        found.add(class_behind(program, value, define) if value is not None else None)
    if len(found) == 1 and (only := found.pop()) is not None:
        return only
    kind = define(program, parameter.annotation) if isinstance(parameter.annotation, ast.Name) else None
    return kind if isinstance(kind, ast.ClassDef) else None


def _calls(program: Program, function: Function, own: ast.ClassDef | None, define: Define) -> Iterator[ast.Call]:
    """The calls that run a function: told by its name, for `callee` asks here what objects are."""
    if own is None:
        yield from (each for each in program.named.get(function.name, []) if define(program, each.func) is function)
    elif function.name == "__init__":
        yield from made_of(program, define).get(own, [])
    else:
        alone = len(program.methods.get(function.name, [])) == 1 and function.name not in COMMON
        for call in program.named.get(function.name, []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if owner is not None and (alone or class_behind(program, owner, define) is own):
                yield call
