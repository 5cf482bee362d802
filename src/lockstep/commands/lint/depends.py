"""What enters the computation of a value, wherever its names were bound."""

import ast
from collections.abc import Callable, Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.origins import DEPTH, origins
from lockstep.commands.lint.parts import entries, of_self
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Binding, Function
from lockstep.commands.lint.tree import text_of, walk


def depends(
    program: Program, node: ast.AST, wanted: Callable[[ast.AST], bool], depth: int = 0, seen: set[ast.AST] | None = None
) -> bool:
    """Whether something wanted enters the computation of a value, here or where its names were bound."""
    seen = set() if seen is None else seen
    passed = set[ast.AST]()
    for each in walk(node):
        if each in passed:
            continue
        if wanted(each):
            return True
        entry = _entry(program, each) if isinstance(each, ast.Subscript) and depth <= DEPTH else None
        if entry is not None:
            if each not in seen and any(depends(program, value, wanted, depth + 1, seen) for value in entry):
                return True
            seen.add(each)
            passed.update(walk(each))
            continue
        if each in seen or depth > DEPTH or not isinstance(each, ast.Name | ast.Attribute | ast.Call):
            continue
        seen.add(each)
        if any(depends(program, value, wanted, depth + 1, seen) for value in entering(program, each)):
            return True
    return False


def _entry(program: Program, node: ast.Subscript) -> list[ast.AST] | None:
    """The value of `logs["loss"]` where logs is a dictionary that is written out; None where it isn't."""
    if isinstance(node.slice, ast.Slice | ast.Tuple | ast.BinOp):
        return None
    made = origins(program, node.value)
    if not made or not all(isinstance(each, ast.Dict) and None not in each.keys for each in made):
        return None
    if any(_returned(program, each) for each in made):
        return None  # the call that made it enters as well
    keys = [each.value if isinstance(each, ast.Constant) else None for each in origins(program, node.slice)]
    found = [entries(program, each, key) for each in made for key in keys if isinstance(key, str)]
    if len(found) != len(made) * len(keys) or not all(found):
        return None
    return [value for parts in found for value, path in parts if not path]


def _returned(program: Program, made: ast.AST) -> bool:
    """Whether a dictionary is returned by the function that it stands in, by itself or by its name."""
    source = program.owner[made]
    parent, function = source.parents[made], function_of(source, made)
    names = {each.id for each in getattr(parent, "targets", []) if isinstance(each, ast.Name)}
    if function is None:
        return False
    values = [each for each in returns(program, function) if each is not None]
    return any(each is made or (isinstance(each, ast.Name) and each.id in names) for v in values for each in walk(v))


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
                for binding in source.attributes.get(text_of(node), []):
                    if binding.value is not None:
                        yield binding.node if binding.kind == "aug" else _part(binding)  # with its operator
            yield from _of_property(program, node)
            yield from _of_object(program, node)
        case ast.Call():
            called = callee(program, node)
            if called is not None and called.name != "__init__":
                yield from (value for value in returns(program, called) if value is not None)


def _of_object(program: Program, node: ast.Attribute) -> Iterator[ast.AST]:
    """What a local class's methods set an attribute to, that is read from outside: `run.accuracy`."""
    if node.attr not in _set_by_self(program) or (isinstance(node.value, ast.Name) and node.value.id == "self"):
        return
    for made in origins(program, node.value):
        owner = definition(program, made.func) if isinstance(made, ast.Call) else None
        if isinstance(made, ast.arg) and made.arg == "self":
            owner = class_of(program.owner[made], made)
        for binding in of_self(program, owner, f"self.{node.attr}") if isinstance(owner, ast.ClassDef) else []:
            if binding.value is not None:
                yield binding.node if binding.kind == "aug" else _part(binding)


@remembered
def _set_by_self(program: Program) -> frozenset[str]:
    known = [name for source in program.sources for name in source.attributes if name.startswith("self.")]
    return frozenset(name.removeprefix("self.") for name in known)


def _part(binding: Binding) -> ast.AST:
    """What a binding is given: of a tuple that is written out, its own part."""
    value = binding.value
    assert value is not None
    for place in binding.path if binding.kind == "value" else ():
        written = isinstance(value, ast.Tuple | ast.List) and not any(
            isinstance(each, ast.Starred) for each in value.elts
        )
        part = at(value.elts, place) if isinstance(value, ast.Tuple | ast.List) and written else None
        if part is None:
            break
        value = part
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
