"""What other functions put into a dictionary that they are given: `config["rank"] = rank` of a parameter `config`."""

import ast
from collections.abc import Callable

from lockstep.commands.lint.parts import Part
from lockstep.commands.lint.program import Program, bindings, remembered
from lockstep.commands.lint.tree import text_of, walk


def filled_elsewhere(
    program: Program, made: ast.AST, index: str | int, follow: Callable[[ast.AST], list[ast.AST]]
) -> list[Part]:
    """The values that functions set an entry of a dictionary to; `follow` tells where their parameter comes from."""
    if not isinstance(made, ast.Dict | ast.Call):
        return []
    return [part for holder, part in _entries_of_parameters(program, index) if made in follow(holder)]


@remembered
def _entries_of_parameters(program: Program, index: str | int) -> list[tuple[ast.Name, Part]]:
    """The places that set this entry of a parameter: the parameter's name there, and what it is set to."""
    ending, found = f"[{index!r}]", list[tuple[ast.Name, Part]]()
    for source in program.sources:
        for text, bound in source.attributes.items():
            for binding in bound if text.endswith(ending) else ():
                holders = [
                    each.value
                    for each in walk(binding.node)
                    if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name) and text_of(each) == text
                ]
                known = [each for each in holders if isinstance(each, ast.Name)][:1]
                if binding.kind == "value" and binding.value is not None:
                    given = [each for each in known if {"param"} == {b.kind for b in bindings(program, each, each.id)}]
                    found += [(each, (binding.value, binding.path)) for each in given]
    return found
