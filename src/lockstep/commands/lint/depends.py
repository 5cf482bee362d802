"""What enters the computation of a value, wherever its names were bound."""

import ast
from collections.abc import Callable, Iterator

from lockstep.commands.lint.calls import argument, callee, sites
from lockstep.commands.lint.origins import DEPTH
from lockstep.commands.lint.parts import returns
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.source import Binding, Function, class_of


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
        if any(depends(program, value, wanted, depth + 1, seen) for value in entering(program, each)):
            return True
    return False


def entering(program: Program, node: ast.AST) -> Iterator[ast.AST]:
    """What a name, an attribute or a local function's call gets its value from."""
    match node:
        case ast.Name(id=name):
            for binding in bindings(program, node, name):
                if binding.kind == "param":
                    function = program.owner[binding.node].scopes[binding.node]
                    if isinstance(function, Function):
                        given = [argument(site, name) for site in sites(program, function)]
                        yield from (value for value in given if value is not None)
                elif binding.kind in ("value", "item", "with") and binding.value is not None:
                    yield _part(binding)
                elif binding.kind == "aug":
                    yield binding.node  # with its operator
        case ast.Attribute():
            for source in program.sources:
                for binding in source.attributes.get(ast.unparse(node), []):
                    if binding.value is not None:
                        yield binding.node if binding.kind == "aug" else _part(binding)  # with its operator
            yield from _of_property(program, node)
        case ast.Call():
            called = callee(program, node)
            if called is not None and called.name != "__init__":
                yield from (value for value in returns(program, called) if value is not None)


def _part(binding: Binding) -> ast.AST:
    """What a binding is given: of a tuple that is written out, its own part."""
    value = binding.value
    assert value is not None
    for place in binding.path if binding.kind == "value" else ():
        written = isinstance(value, ast.Tuple | ast.List) and not any(
            isinstance(each, ast.Starred) for each in value.elts
        )
        if not (isinstance(value, ast.Tuple | ast.List) and written and place < len(value.elts)):
            break
        value = value.elts[place]
    return value


def _of_property(program: Program, node: ast.Attribute) -> Iterator[ast.AST]:
    """What the property of that name of a local class returns: of its own class, or of the only one that has it."""
    known = [each for each in program.methods.get(node.attr, []) if any(map(_is_property, each.decorator_list))]
    if isinstance(node.value, ast.Name) and node.value.id == "self" and len(known) > 1:
        own = class_of(program.owner[node], node)
        known = [each for each in known if program.owner[each].parents[each] is own]
    if len(known) == 1:
        yield from (value for value in returns(program, known[0]) if value is not None)


def _is_property(node: ast.expr) -> bool:
    return last_name(node) in ("property", "cached_property")
