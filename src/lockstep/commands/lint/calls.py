"""Who calls whom: the local functions behind calls, and where each is started."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.source import Function, class_of, function_of, parameters
from lockstep.commands.lint.words import COMMON


def definition(program: Program, node: ast.AST) -> Function | ast.ClassDef | None:
    """The local function or class that a name means."""
    path, colon, name = qualified(program, node).partition(":")
    if not colon:
        return _cls(program, node)
    source = program.modules.get(Path(path))
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
    found, waiting = [owner], list(owner.bases)
    while waiting and len(found) < 12:
        above = definition(program, waiting.pop(0))
        if isinstance(above, ast.ClassDef) and above not in found:
            found.append(above)
            waiting[:0] = above.bases
    return found


@remembered
def _children(program: Program) -> dict[ast.ClassDef, list[ast.ClassDef]]:
    found: dict[ast.ClassDef, list[ast.ClassDef]] = {}
    for source in program.sources:
        for node in source.nodes:
            for base in node.bases if isinstance(node, ast.ClassDef) else []:
                above = definition(program, base)
                if isinstance(above, ast.ClassDef) and isinstance(node, ast.ClassDef):
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
            return method(program, owner, call.func.attr)
        if len(known) == 1 and call.func.attr not in COMMON and not qualified(program, call.func):
            return known[0]
    return None


def instance_of(program: Program, node: ast.AST) -> ast.ClassDef | None:
    """The local class of an object, where the name or attribute was bound to what the class returns."""
    source = program.owner[node]
    match node:
        case ast.Name(id=name):
            found = bindings(program, node, name)
        case ast.Attribute():
            found = source.attributes.get(ast.unparse(node), [])
        case ast.Call():
            owner = definition(program, node.func)
            return owner if isinstance(owner, ast.ClassDef) else None
        case _:
            return None
    for binding in found:
        value = binding.value if binding.kind == "value" else None
        for place in binding.path:  # a, b = A(), B()
            value = value.elts[place] if isinstance(value, ast.Tuple) and place < len(value.elts) else None
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if isinstance(value.func.value, ast.Call):
                value = value.func.value  # Tally().to(device)
            else:
                break
        owner = definition(program, value.func) if isinstance(value, ast.Call) else None
        if isinstance(owner, ast.ClassDef):
            return owner
    return None


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a function is started; `offset`: parameters that the call itself fills (self; a spawned rank)."""

    call: ast.Call
    function: Function
    arguments: list[ast.expr]
    offset: int
    spawned: bool = False


def sites(program: Program, function: Function) -> list[Site]:
    """Where a function is called, or started in other processes."""
    if "sites" not in program.memo:
        found: dict[Function, list[Site]] = {}
        for call in program.calls:
            for site in _sites(program, call):
                found.setdefault(site.function, []).append(site)
        program.memo["sites"] = found
    known = program.memo["sites"]
    assert isinstance(known, dict)
    result: list[Site] = known.get(function, [])
    return result


def _sites(program: Program, call: ast.Call) -> Iterator[Site]:
    function = callee(program, call)
    if function is not None:
        bound = isinstance(program.owner[function].parents[function], ast.ClassDef)
        static = any(last_name(each) == "staticmethod" for each in function.decorator_list)
        filled = bound and not static
        if filled and isinstance(call.func, ast.Attribute) and last_name(call.func) != "__init__":
            through = isinstance(definition(program, call.func.value), ast.ClassDef)
            filled = not through or any(last_name(each) == "classmethod" for each in function.decorator_list)
        yield Site(call, function, list(call.args), int(filled))
    name = last_name(call.func)
    keywords = {each.arg: each.value for each in call.keywords}
    target = keywords.get("target") or keywords.get("fn") or (call.args[0] if call.args else None)
    if name in ("spawn", "start_processes", "Process", "Thread", "notebook_launcher", "run", "launch") and target:
        started = definition(program, target)
        if isinstance(started, Function):
            given = keywords.get("args") or (call.args[1] if len(call.args) > 1 and name != "Process" else None)
            arguments = list(given.elts) if isinstance(given, ast.Tuple | ast.List) else []
            yield Site(call, started, arguments, int(name in ("spawn", "start_processes")), name != "Thread")


def argument(site: Site, parameter: str) -> ast.expr | None:
    """What a call gives for a parameter: None where that is the default, or can't be told."""
    if not site.spawned:
        for keyword in site.call.keywords:
            if keyword.arg == parameter:
                return keyword.value
    names = [each.arg for each in parameters(site.function)]
    if parameter not in names:
        return None
    place = names.index(parameter) - site.offset
    if 0 <= place < len(site.arguments) and not any(isinstance(a, ast.Starred) for a in site.arguments[: place + 1]):
        return site.arguments[place]
    return None


def default(function: Function, parameter: str) -> ast.expr | None:
    """The default of a parameter, where it has one."""
    positional = [*function.args.posonlyargs, *function.args.args]
    for each, value in zip(reversed(positional), reversed(function.args.defaults), strict=False):
        if each.arg == parameter:
            return value
    for each, other in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if each.arg == parameter:
            return other
    return None
