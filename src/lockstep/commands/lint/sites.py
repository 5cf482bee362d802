"""Where the local functions are called, and what each call gives them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.aliases import filled, hooks
from lockstep.commands.lint.calls import callee, chosen, definition
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.source import Function, parameters


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
        bound_here = bound and not static
        if bound_here and isinstance(call.func, ast.Attribute) and last_name(call.func) != "__init__":
            through = isinstance(definition(program, call.func.value), ast.ClassDef)
            bound_here = not through or any(last_name(each) == "classmethod" for each in function.decorator_list)
        yield Site(call, function, _spread(program, call, function, int(bound_here)), int(bound_here))
    for one in chosen(program, call) if function is None else ():
        yield Site(call, one, list(call.args), int(isinstance(program.owner[one].parents[one], ast.ClassDef)))
    yield from (Site(call, hook, given, 1) for hook, given in hooks(program, call, function))
    name = last_name(call.func)
    keywords = {each.arg: each.value for each in call.keywords}
    target = keywords.get("target") or keywords.get("fn") or (call.args[0] if call.args else None)
    if name in ("submit", "to_thread") and call.args and function is None:
        handed = definition(program, call.args[0])
        if isinstance(handed, Function):
            yield Site(call, handed, call.args[1:], 0)
    if name in ("spawn", "start_processes", "Process", "Thread", "notebook_launcher", "run", "launch") and target:
        started = definition(program, target)
        if isinstance(started, Function):
            given = keywords.get("args") or (call.args[1] if len(call.args) > 1 and name != "Process" else None)
            arguments = list(given.elts) if isinstance(given, ast.Tuple | ast.List) else []
            yield Site(call, started, arguments, int(name in ("spawn", "start_processes")), name != "Thread")
    if name == "step" and len(call.args) == 1 and isinstance(closure := definition(program, call.args[0]), Function):
        yield Site(call, closure, [], 0)  # optimizer.step(closure)


def _spread(program: Program, call: ast.Call, function: Function, offset: int) -> list[ast.expr]:
    """A call's arguments, with `*pair` behind them as pair[0], pair[1] for the parameters that have no default."""
    given = [*(filled(call)[0]), *call.args]
    star = given[-1] if given else None
    if not isinstance(star, ast.Starred) or any(isinstance(each, ast.Starred) for each in given[:-1]):
        return given
    if isinstance(star.value, ast.Name) and not bindings(program, star.value, star.value.id):
        return given  # *args of the function around it
    named = [*function.args.posonlyargs, *function.args.args]
    left = len(named) - len(function.args.defaults) - offset - len(given) + 1
    parts = [ast.copy_location(ast.Subscript(star.value, ast.Constant(n), ast.Load()), star) for n in range(left)]
    source = program.owner[call]
    for node, parent in [pair for each in parts for pair in ((each, call), (each.slice, each))]:
        source.parents[node], source.scopes[node], program.owner[node] = parent, source.scopes[call], source
    return [*given[:-1], *parts] if parts else given


def argument(site: Site, parameter: str) -> ast.expr | None:
    """What a call gives for a parameter: None where that is the default, or can't be told."""
    if not site.spawned:
        for keyword in [*site.call.keywords, *filled(site.call)[1]]:
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
