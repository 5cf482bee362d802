"""What a data set of a local class is made of: its arguments, without what only changes the pictures.

A rank's share of a frame or a list stands for the whole of it.
"""

import ast
import re

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import lineage, method
from lockstep.commands.lint.instances import resolve
from lockstep.commands.lint.keys import Key, call_key, key
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.ranks import is_rank
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.sites import default
from lockstep.commands.lint.source import Binding, Function, Loop, parameters
from lockstep.commands.lint.tree import text_of, walk
from lockstep.commands.lint.ways import Made, within

DRESS = re.compile(r"transform|augment|download|tfm|preprocess|collate")
_AS_IT_IS = ("reset_index", "copy", "tolist", "list", "tuple", "array", "to_numpy")


def of_class(program: Program, made: Made, owner: ast.ClassDef) -> Key | None:
    """The key of an object of a local class by the arguments that choose its samples."""
    call = made.node
    assert isinstance(call, ast.Call)
    init = method(program, owner, "__init__")
    named = {each.arg: each.value for each in call.keywords}
    if None in named or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    if init is None:
        kept = [each for each in call.args if not dresses(program, within(made, each))]
        others = [each for each in call.keywords if not DRESS.search(each.arg or "")]
        return call_key(program, made, call.func, kept, others)
    head = call_key(program, made, call.func, [], [])
    names = [each.arg for each in parameters(init)][1:]
    found: list[Key] = [] if head is None else [head]
    for place, name in enumerate(names):
        node = call.args[place] if place < len(call.args) else named.get(name, default(init, name))
        if node is None or head is None or set(named) - set(names):
            return None  # what *files or **options hold
        if not _shows(program, owner, init, name):
            one = whole(program, within(made, node))
            told = None if one is None else key(program, one) or _as_bound(program, one)
            if told is None:
                return None
            found.append(told)
    return ("object", *found)


def dresses(program: Program, one: Made) -> bool:
    """Whether an argument is a transformation, not a choice of samples."""
    named = DRESS.search(last_name(one.node).lower())
    made = [each.node for each in resolve(program, one) if isinstance(each.node, ast.Call)]
    return bool(named) or any(
        "ransform" in qualified(program, each.func) + text_of(each.func) or "Compose" in text_of(each) for each in made
    )


def _shows(program: Program, owner: ast.ClassDef, init: Function, name: str) -> bool:
    """Whether a parameter says how samples are shown: called as a transform is, or asked for in __getitem__ alone."""
    if DRESS.search(name):
        return True
    source = program.owner[init]
    read = [each for each in walk(init) if isinstance(each, ast.Name) and each.id == name]
    kept = {
        text
        for text, bound in source.attributes.items()
        for each in bound
        if text.startswith("self.") and function_of(source, each.node) is init and _part(each) in read
    }
    if len(read) != 1 or len(kept) != 1:
        return False
    uses = [
        each
        for base in lineage(program, owner)
        for each in walk(base)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load) and text_of(each) in kept
    ]
    called = [each for each in uses if getattr(program.owner[each].parents[each], "func", None) is each]
    return bool(called) or (bool(uses) and all(_asked(program, each) for each in uses))


def _part(bound: Binding) -> ast.AST | None:
    """What a binding is given: its own part of a tuple."""
    value = bound.value
    for place in bound.path:
        value = at(value.elts, place) if isinstance(value, ast.Tuple) else None
    return value


def _asked(program: Program, node: ast.AST) -> bool:
    """Whether an attribute is a condition in __getitem__ under which nothing is chosen: `if self.train:`."""
    function, inner = function_of(program.owner[node], node), node
    for outer in above(program.owner[node], node):
        if isinstance(outer, ast.If | ast.IfExp) and outer.test is inner:
            branches = [*outer.body, *outer.orelse] if isinstance(outer, ast.If) else [outer.body, outer.orelse]
            names = {last_name(one) for each in branches for one in walk(each)}
            chosen = {each.arg for each in parameters(function)[1:2]} if function is not None else set()
            return function is not None and function.name == "__getitem__" and not names & chosen
        inner = outer
    return False


def ranked(node: ast.AST) -> bool:
    """Whether a rank enters a number."""
    return any(map(is_rank, walk(node)))


def whole(program: Program, one: Made, depth: int = 0) -> Made | None:
    """What a rank's share of a list or a frame is taken from: x of x[rank::world], of x.iloc[rank::world].

    None where something else is chosen by the rank.
    """
    found = resolve(program, one)
    if len(found) != 1 or depth > 6:
        return one
    match found[0].node:
        case ast.Subscript(value=value, slice=ast.Slice(lower=ast.expr() as lower, step=ast.expr())) if ranked(lower):
            inner = value.value if isinstance(value, ast.Attribute) and value.attr == "iloc" else value
            return whole(program, within(found[0], inner), depth + 1)
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _AS_IT_IS and not ranked(value):
            return whole(program, within(found[0], value), depth + 1)
        case ast.Call(func=ast.Attribute(value=value, attr="reset_index" | "copy")):
            return whole(program, within(found[0], value), depth + 1)
        case ast.AST() as node if ranked(node):
            return None
    return one


def _as_bound(program: Program, one: Made) -> Key | None:
    """What may be one of several values, by the line that binds it and what the parameters around that hold."""
    while isinstance(one.node, ast.Name) and one.node in program.owner:
        source = program.owner[one.node]
        found = reaching(program, one.node, bindings(program, one.node, one.node.id))
        if len(found) != 1:
            return None
        if found[0].kind == "param" and found[0].node in one.given:
            one = one.given[found[0].node]
        elif found[0].kind == "value" and not any(isinstance(each, Loop) for each in above(source, found[0].node)):
            return ("bound", found[0].node, found[0].path, _held(program, found[0].node, one))
        else:
            return None
    return None


def _held(program: Program, node: ast.AST, one: Made, depth: int = 0) -> Key:
    """What the parameters of a place's function hold on the way to it, and so on outward."""
    function = function_of(program.owner[node], node) if node in program.owner else None
    names = [*parameters(function)] if function is not None and depth < 5 else []
    held = [(each, one.given[each]) for each in names if each in one.given]
    return tuple((each, made.node, _held(program, made.node, made, depth + 1)) for each, made in held)
