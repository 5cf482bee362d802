"""What is done to a network after DistributedDataParallel has taken note of its parameters."""

import ast

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.order import before
from lockstep.commands.lint.program import Program, bindings
from lockstep.commands.lint.reaching import exclude, reaching
from lockstep.commands.lint.several import wrapped, wraps
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Source
from lockstep.commands.lint.tree import text_of, walk


def after_wrapping(program: Program, call: ast.Call, model: ast.expr) -> list[ast.Call]:
    """The wrappers that a model is, or whose network it is, where a process comes by the call after them."""
    owner = model.value if isinstance(model, ast.Attribute) and model.attr == "module" else model
    direct = wraps(program, owner)
    inner = [each for each in wrapped(program) if each.args and _same(program, each.args[0], model)]
    found = [each for each in direct if _is_after(program, call, each, known=True)]
    return found + [each for each in inner if each not in direct and _is_after(program, call, each, known=False)]


def _is_after(program: Program, call: ast.Call, wrapper: ast.Call, *, known: bool) -> bool:
    source = program.owner[call]
    here = source is program.owner[wrapper] and function_of(source, call) is function_of(source, wrapper)
    if call in walk(wrapper) or (here and exclude(source, call, wrapper)):
        return False
    earlier = before(program, call, wrapper)
    return not earlier if earlier is not None else known or (here and call.lineno > wrapper.lineno)


def _same(program: Program, one: ast.expr, other: ast.expr) -> bool:
    """Whether two expressions are one name that was bound once, or one attribute of a class's objects."""
    home = program.owner[one]
    if text_of(one) != text_of(other) or home is not program.owner[other]:
        return False
    if isinstance(one, ast.Name):
        first, last = (set(reaching(program, each, bindings(program, each, one.id))) for each in (one, other))
        return bool(first) and first == last
    if not (isinstance(one, ast.Attribute) and isinstance(other, ast.Attribute) and text_of(one.value) == "self"):
        return False
    held = _held(home, one)
    return class_of(home, one) is class_of(home, other) and bool(held) and held == _held(home, other)


def _held(home: Source, node: ast.Attribute) -> set[ast.AST]:
    """The assignment that an attribute has its value from: the last one above in its function, else those elsewhere."""
    known = [each.node for each in home.attributes.get(text_of(node), []) if node not in walk(each.node)]
    here = [each for each in known if function_of(home, each) is function_of(home, node)]
    above_it = [each for each in here if getattr(each, "lineno", 0) < node.lineno]
    straight = [each for each in above_it if home.parents[each] is function_of(home, node)]
    return set(above_it[above_it.index(straight[-1]) :]) if straight else set(known)


def where(program: Program, call: ast.Call, model: ast.expr) -> ast.Call:
    """The call to tell of: that of the local function around, where the model is handed to it."""
    found = bindings(program, model, model.id) if isinstance(model, ast.Name) else []
    function = function_of(program.owner[call], call)
    if [each.kind for each in found] != ["param"] or function is None or not isinstance(model, ast.Name):
        return call
    given = [(site.call, argument(site, model.id)) for site in sites(program, function)]
    late = [place for place, value in given if value is not None and wraps(program, value)]
    return late[0] if late else call
