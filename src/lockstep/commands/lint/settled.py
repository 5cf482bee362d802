"""Entries of a dictionary that other functions set: those that are given it, and those that know it by its name."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.program import Program, bindings, remembered
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Binding, parameters


def set_elsewhere(program: Program, made: ast.AST, name: str, index: str | int) -> Iterator[Binding]:
    """`cfg["batch"] = cfg["batch"] // n` in a function that is called with what `name` was bound to."""
    home = program.owner[made]
    for holder, binding in _entries(program).get(repr(index), []):
        source = program.owner[binding.node]
        function = function_of(source, binding.node)
        if function is None or (source is home and function is function_of(home, made)):
            continue
        if holder in [each.arg for each in parameters(function)]:
            given = [argument(site, holder) for site in sites(program, function)]
            if any(isinstance(each, ast.Name) and _is(program, each, each.id, made) for each in given):
                yield binding
        elif holder == name and _is(program, binding.node, holder, made):
            yield binding


def _is(program: Program, node: ast.AST, name: str, made: ast.AST) -> bool:
    return any(each.value is made for each in bindings(program, node, name))


@remembered
def _entries(program: Program) -> dict[str, list[tuple[str, Binding]]]:
    """The keys that are written out -> the names of dictionaries, and what is assigned there."""
    found: dict[str, list[tuple[str, Binding]]] = {}
    for source in program.sources:
        for text, known in source.attributes.items():
            if (match := re.fullmatch(r"(\w+)\[(.+)\]", text)) is not None:
                found.setdefault(match[2], []).extend((match[1], each) for each in known)
    return found
