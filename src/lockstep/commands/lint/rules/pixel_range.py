"""Pixels that are brought from 0..255 to 0..1 twice: by hand, and by a transform that does it as well."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loaders_of, over_loader
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant, datasets, given, of_loader
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.chains import CHAINS, Wanted, comes_through, normalises, scales, steps
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk

_TWICE = "brought from 0..255 to 0..1 twice"


def rescaled(program: Program) -> Iterator[Hit]:
    """A division by 255 in a chain, in a loop over a loader, or in a data set, beside a transform that divides."""
    for name in CHAINS:
        for call in program.named.get(name, []):
            yield from _in_chain(program, call)
    for source in program.sources if any(name in program.named for name in ("ToTensor", "ToDtype")) else []:
        for node in source.of(ast.BinOp, ast.AugAssign, ast.Call):
            if _in_loop(program, node):
                yield Hit(node, _TWICE)
    for function in program.methods.get("__getitem__", []) if any(name in program.named for name in CHAINS) else []:
        yield from _in_set(program, function)


def divided(node: ast.AST) -> ast.expr | None:
    """What a node divides by 255."""
    match node:
        case ast.BinOp(left=changed, op=ast.Div(), right=ast.Constant(value=255)):
            return changed
        case ast.AugAssign(target=ast.Name() as changed, op=ast.Div(), value=ast.Constant(value=255)):
            return changed
        case ast.Call(func=ast.Attribute(value=changed, attr="div" | "div_"), args=[ast.Constant(value=255)]):
            return changed
    return None


def divides_first(program: Program, call: ast.Call) -> bool:
    """Albumentations' Normalize, which takes pixels of 0..255 and divides them, unless it is told another maximum."""
    if last_name(call.func) != "Normalize" or not qualified(program, call.func).startswith("albumentations."):
        return False
    most, kind = given(program, call, "max_pixel_value", 2), given(program, call, "normalization", 3)
    return kind is None and (most is None or constant(program, most) == 255)


def _in_chain(program: Program, call: ast.Call) -> Iterator[Hit]:
    """x / 255 beside ToTensor in one Compose, and ToFloat before Albumentations' Normalize."""
    parts = call.args[0].elts if call.args and isinstance(call.args[0], ast.List) else []
    if any(steps(program, each, scales) for each in parts):
        yield from (Hit(part) for part in parts if any(_divides(each) for each in walk(part)))
    for place, part in enumerate(parts):
        to_float = isinstance(part, ast.Call) and qualified(program, part.func) == "albumentations.ToFloat"
        after = [each for one in parts[place + 1 :] for each in steps(program, one, divides_first)] if to_float else []
        yield from (Hit(each, _TWICE) for each in after[:1])


def _divides(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and divided(node) is not None


def _in_loop(program: Program, node: ast.AST) -> bool:
    """x / 255 in a loop over pictures of torchvision's that ToTensor has divided already."""
    changed = divided(node)
    around = above(program.owner[node], node) if changed is not None else ()
    loop = next((each for each in around if isinstance(each, ast.For) and over_loader(program, each)), None)
    target = loop.target if loop is not None else None
    while isinstance(target, ast.Tuple) and target.elts:  # of `i, (x, y)` the x
        target = next((each for each in target.elts if isinstance(each, ast.Tuple)), target.elts[0])
    if loop is None or changed is None or not isinstance(target, ast.Name):
        return False
    known = loaders_of(program, loop)
    sets = [
        one for each in known if (of := of_loader(program, each, "dataset")) is not None for one in origins(program, of)
    ]
    pictures = bool(sets) and set(sets) <= set(datasets(program))
    named = target.id in _names(changed)
    return named and pictures and all(comes_through(program, each, scales) for each in known)


def _in_set(program: Program, function: Function) -> Iterator[Hit]:
    """A division before Albumentations' Normalize, or after a transform, in a data set's __getitem__."""
    source, owner = program.owner[function], class_of(program.owner[function], function)
    opened = owner is not None and "Image.open(" in text_of(owner)  # of an array of floats, ToTensor divides nothing
    ways = (normalises, scales) if opened else (normalises,)
    calls = [each for each in walk(function) if isinstance(each, ast.Call)]
    calls = [each for each in calls if _goes_through(program, each, normalises, scales)]
    for node in walk(function) if calls else ():
        changed = divided(node)
        if changed is None or any(isinstance(each, ast.If | ast.IfExp) for each in above(source, node)):
            continue
        for call in calls:
            out = _bound(statement_of(source, call))
            after = bool(out) and out in _names(changed) and _stays(function, out, call, node)
            if after and _goes_through(program, call, *ways):
                yield Hit(node, _TWICE)
            before = _is_given(function, call, node, _bound(statement_of(source, node)))
            if before and _goes_through(program, call, divides_first):
                yield Hit(node, _TWICE)


def _is_given(function: Function, call: ast.Call, node: ast.AST, name: str) -> bool:
    """Whether a transform is given what a place makes as its picture: at once, or by the name that it is bound to."""
    picture = next((each.value for each in call.keywords if each.arg == "image"), None)
    picture = picture or next(iter(call.args), None)
    if picture is None:
        return False
    return node in walk(picture) or (bool(name) and name in _names(picture) and _stays(function, name, node, call))


def _goes_through(program: Program, call: ast.Call, *wanted: Wanted) -> bool:
    """Whether a call is of transforms that each have one of some steps; None stands for no transform."""
    if not isinstance(call.func, ast.Name | ast.Attribute) or definition(program, call.func) is not None:
        return False
    made = [each for each in origins(program, call.func) if not isinstance(each, ast.Constant)]
    return bool(made) and all(
        isinstance(each, ast.Call) and each is not call and any(steps(program, each, one) for one in wanted)
        for each in made
    )


def _stays(function: Function, name: str, first: ast.AST, last: ast.AST) -> bool:
    """Whether nothing between two places of a function makes a name another picture, or one of 0..255 again."""
    begin, end = _place(first), _place(last)
    bound = [each for each in walk(function) if isinstance(each, ast.Assign) and _bound(each) == name]
    between = [each for each in bound if begin < _place(each) < end and last not in walk(each)]
    return begin < end and all(
        name in _names(each.value) and "255" not in text_of(each) and "int" not in text_of(each) for each in between
    )


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _bound(statement: ast.stmt) -> str:
    """The one name that a statement gives a value to."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in walk(node) if isinstance(each, ast.Name)}
