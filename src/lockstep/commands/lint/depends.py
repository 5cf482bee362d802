"""What enters the computation of a value, wherever its names were bound."""

import ast
from collections.abc import Callable, Iterator

from lockstep.commands.lint.calls import argument, callee, sites
from lockstep.commands.lint.origins import DEPTH
from lockstep.commands.lint.parts import returns
from lockstep.commands.lint.program import Program, bindings
from lockstep.commands.lint.source import Function


def depends(
    program: Program, node: ast.AST, wanted: Callable[[ast.AST], bool], depth: int = 0, seen: set[ast.AST] | None = None
) -> bool:
    """Whether something wanted enters the computation of a value, here or where its names were bound."""
    seen = set() if seen is None else seen
    for each in ast.walk(node):
        if wanted(each):
            return True
        if each in seen or depth > DEPTH or not isinstance(each, ast.Name | ast.Attribute | ast.Call):
            continue
        seen.add(each)
        if any(depends(program, value, wanted, depth + 1, seen) for value in _sources(program, each)):
            return True
    return False


def _sources(program: Program, node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Name(id=name):
            for binding in bindings(program, node, name):
                if binding.kind == "param":
                    function = program.owner[binding.node].scopes[binding.node]
                    if isinstance(function, Function):
                        given = [argument(site, name) for site in sites(program, function)]
                        yield from (value for value in given if value is not None)
                elif binding.kind in ("value", "item", "with") and binding.value is not None:
                    yield binding.value
                elif binding.kind == "aug":
                    yield binding.node  # with its operator
        case ast.Attribute():
            for source in program.sources:
                for binding in source.attributes.get(ast.unparse(node), []):
                    if binding.value is not None:
                        yield binding.value
        case ast.Call():
            called = callee(program, node)
            if called is not None and called.name != "__init__":
                yield from (value for value in returns(program, called) if value is not None)
