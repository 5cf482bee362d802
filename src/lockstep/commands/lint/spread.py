"""Where a rank's own sums get to: what a loop adds up is returned, handed on, kept in attributes, and read there."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.around import class_of, function_of, statement_of
from lockstep.commands.lint.flow import added_up, is_telling, mentions, own_nodes, reduces, root_name, tainted
from lockstep.commands.lint.places import backwards, collects, inside, loaders_of, model_calls
from lockstep.commands.lint.program import Program, remembered
from lockstep.commands.lint.sites import Site, argument, sites
from lockstep.commands.lint.source import Function, Loop, parameters
from lockstep.commands.lint.told import alike, is_result
from lockstep.commands.lint.tree import walk

_FAR = 3  # calls and returns followed in a row


@dataclass(frozen=True, eq=False)
class Place:
    """A function (None: a file's top) that some of these sums get to: its nodes, and the names that hold them there.

    `far`: the calls and returns on the way there.
    """

    function: Function | None
    nodes: list[ast.AST]
    names: frozenset[str]
    far: int


@remembered
def places(program: Program, loop: Loop) -> list[Place]:
    """The functions that get what a loop adds up, its own first; empty where one of them puts the ranks' together."""
    return spread(program, loop, frozenset((added_up(loop) - alike(loop)) | _yielded(loop)))


def _yielded(loop: Loop) -> set[str]:
    """The names that a loop binds and yields in each pass: the losses of a generator of steps."""
    made = {
        each.id
        for part in loop.body
        for each in walk(part)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    found = [each.value for each in walk(loop) if isinstance(each, ast.Yield) and each.value is not None]
    return {each.id for value in found for each in walk(value) if isinstance(each, ast.Name)} & made


@remembered
def comprehended(program: Program, training: bool) -> list[tuple[ast.comprehension, ast.stmt, list[Place]]]:
    """The comprehensions over loaders that train in each pass, or judge; their statements; where the numbers get to.

    None whose numbers are put together over the ranks.
    """
    found, runs = [], set(backwards(program))
    for source in program.sources:
        for node in source.nodes if runs else []:
            if not isinstance(node, ast.ListComp | ast.GeneratorExp) or not loaders_of(program, node.generators[0]):
                continue
            within = inside(program, node.elt)
            judges = (
                any(map(is_result, within)) and bool(model_calls(program, node.elt)) and not collects(program, node)
            )
            if (runs & set(within)) if training else judges and not runs & set(within) and not collects(program, node):
                statement = statement_of(source, node)
                got = _gets_to(program, node) if not any(reduces(program, each) for each in within) else []
                found += [(node.generators[0], statement, got)] if got else []
    return found


def _gets_to(program: Program, node: ast.expr, far: int = 0) -> list[Place]:
    """Where a value gets to that a statement binds, tells or returns; empty where the ranks' are put together."""
    statement = statement_of(program.owner[node], node)
    around = [each for each in walk(statement) if isinstance(each, ast.Call) and node in walk(each)]
    function = function_of(program.owner[node], node)
    if any(reduces(program, each) for each in around if each is not node):
        return []
    if isinstance(statement, ast.Return) and function is not None and far < _FAR:
        ways = [_gets_to(program, site.call, far + 1) for site in sites(program, function)]
        return [each for way in ways for each in way] if all(ways) else []
    if any(map(is_telling, around)):
        return [Place(function, own_nodes(program, node), frozenset(), far)]
    return spread(program, statement, frozenset(bound_to(program, node)))


def spread(program: Program, node: ast.AST, names: frozenset[str]) -> list[Place]:
    """The functions that get what these names hold in a node's function."""
    found, seen = list[Place](), set[tuple[Function | None, frozenset[str]]]()
    waiting = [(node, names, 0)]
    while waiting and len(found) < 24:
        here, seeds, far = waiting.pop(0)
        function, nodes = function_of(program.owner[here], here), own_nodes(program, here)
        held = frozenset(tainted(nodes, set(seeds)))
        if not seeds or (function, seeds) in seen:
            continue
        seen.add((function, seeds))
        if any(reduces(program, each) and mentions(each, set(held)) for each in nodes):
            return []
        found.append(Place(function, nodes, held, far))
        if far < _FAR:
            waiting += [(*each, far + 1) for each in _onwards(program, function, nodes, held)]
    return found


def _onwards(
    program: Program, function: Function | None, nodes: list[ast.AST], held: frozenset[str]
) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """A node of each function that is called with what these names hold, or that calls this one, and its names."""
    names = set(held)
    for node in nodes:
        for part in [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else []:
            if mentions(part, names):
                for site, parameter in handed(program).get(part, ()):
                    if site.function.name != "__init__":
                        yield site.function.body[0], frozenset({parameter})
    if function is None:
        return
    values = [each.value for each in nodes if isinstance(each, ast.Return | ast.Yield) and each.value is not None]
    if any(mentions(each, names) for each in values):
        for site in sites(program, function):
            yield site.call, frozenset(bound_to(program, site.call))
    owner = class_of(program.owner[function], function)
    kept = frozenset(each for each in held if each.startswith("self."))
    for method in owner.body if owner is not None and kept else ():
        if isinstance(method, Function) and method is not function and mentions(method, set(kept)):
            yield method.body[0], kept


@remembered
def handed(program: Program) -> dict[ast.expr, list[tuple[Site, str]]]:
    """The expressions that calls of local functions are given -> the calls, and the parameter that each is."""
    found: dict[ast.expr, list[tuple[Site, str]]] = {}
    for function in [each for source in program.sources for each in source.functions]:
        known = [each.arg for each in parameters(function)]
        for site in sites(program, function):
            if site.spawned:
                continue
            for name in known:
                if (value := argument(site, name)) is not None:
                    found.setdefault(value, []).append((site, name))
            if function.args.kwarg is not None:
                for keyword in site.call.keywords:
                    if keyword.arg is not None and keyword.arg not in known:
                        found.setdefault(keyword.value, []).append((site, function.args.kwarg.arg))
            if function.args.vararg is not None:
                for value in site.arguments[len(known) - site.offset :]:
                    found.setdefault(value, []).append((site, function.args.vararg.arg))
    return found


def bound_to(program: Program, call: ast.expr) -> set[str]:
    """The names that hold what a call returns: `train` of `train, val = self.train(), self.test()`."""
    statement = statement_of(program.owner[call], call)
    match statement:
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)) if len(targets) == len(values):
            return {root_name(each) for each, value in zip(targets, values, strict=True) if call in walk(value)} - {""}
        case ast.Assign(targets=targets):
            return {
                root_name(part) for each in targets for part in walk(each) if isinstance(part, ast.Name | ast.Attribute)
            } - {"", "self"}
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=holder, attr="append"), args=[given])):
            return {root_name(holder)} - {"", "self"} if call in walk(given) else set()
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return {root_name(target)} - {""}
        case ast.For(target=target, iter=iterated) if call in walk(iterated):
            return added_up(statement) | {each.id for each in walk(target) if isinstance(each, ast.Name)}
    return set()
