"""A place in a program together with the calls that lead there: what the parameters around it hold."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import definition, instance_of
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.sites import Site, argument, default, sites
from lockstep.commands.lint.source import Binding, Function, Source, parameters
from lockstep.commands.lint.tree import text_of

MOST = 24  # possibilities of one value, and ways that lead to a function


@dataclass(frozen=True, eq=False)
class Made:
    """An expression, what the parameters around it hold, and the nodes by which it was reached, the nearest first."""

    node: ast.AST
    given: Mapping[ast.AST, "Made"] = field(default_factory=dict)
    trail: tuple[ast.AST, ...] = ()


def within(one: Made, node: ast.AST) -> Made:
    """Another expression of the same call."""
    return Made(node, one.given, (*one.trail, one.node))


def placed(one: Made, path: tuple[int, ...]) -> Made:
    """A place of what can't be followed: a tuple of it and the numbers, so that two places are told apart."""
    if not path:
        return one
    return Made(ast.Tuple([cast(ast.expr, one.node), *map(ast.Constant, path)], ast.Load()), one.given, one.trail)


def ways(program: Program, node: ast.AST, depth: int = 0) -> list[Made]:
    """A node with what its function's parameters hold, once for each way of calls that leads to it."""
    function = function_of(program.owner[node], node)
    known = sites(program, function)[:6] if function is not None and depth < 5 else []
    found = [Made(node, entered(site, outer)) for site in known for outer in ways(program, site.call, depth + 1)]
    return found[:MOST] or [Made(node)]


def entered(site: Site, outer: Made) -> dict[ast.AST, Made]:
    """What a call's parameters hold within the function."""
    held = dict(outer.given)
    for each in parameters(site.function):
        value = argument(site, each.arg)
        fallback = default(site.function, each.arg)
        if value is not None:
            held[each] = Made(value, outer.given, outer.trail)
        elif fallback is not None:
            held[each] = Made(fallback)
        else:
            held.pop(each, None)
    return held


def imported(program: Program, binding: Binding) -> ast.AST | None:
    """The value that another local file's top binds to a name, once."""
    found = list(exported(program, binding, None))
    return found[0].value if [(each.kind, each.path) for each in found] == [("value", ())] else None


def exported(program: Program, binding: Binding, importer: Source | None) -> Iterator[Binding]:
    """What the tops of other local files bind to an imported name."""
    module, _, name = binding.target.partition(":")
    for source in program.sources:
        if name and source is not importer and source.path.stem == module.rpartition(".")[2]:
            yield from source.names.get(source.tree, {}).get(name, [])


def _shown(program: Program, known: Binding) -> list[Binding]:
    """A binding; of a property what it returns."""
    node = known.node
    if isinstance(node, Function) and any("property" in last_name(each) for each in node.decorator_list):
        return [Binding("value", node, each) for each in returns(program, node) if each is not None]
    return [known]


def assigned(program: Program, node: ast.Attribute) -> list[Binding]:
    """What is assigned to an attribute: by the methods of its object's class, in the class's body, or right here."""
    owner: ast.AST | None
    if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        owner = class_of(program.owner[node], node)
    else:
        owner = instance_of(program, node.value) or definition(program, node.value)
    if not isinstance(owner, ast.ClassDef):
        return program.owner[node].attributes.get(text_of(node), [])
    found: list[Binding] = []
    waiting: list[ast.AST | None] = [owner]
    while waiting and not found:
        one = waiting.pop(0)
        if isinstance(one, ast.ClassDef):
            home = program.owner[one]
            own = home.attributes.get(f"self.{node.attr}", [])
            found = [each for each in own if class_of(home, each.node) is one]
            found = found or home.names.get(one, {}).get(node.attr, [])
            found = [each for known in found for each in _shown(program, known)]
            waiting += [definition(program, base) for base in one.bases]
    return found
