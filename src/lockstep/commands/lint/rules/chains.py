"""Chains of transforms: which of their steps normalise, and which loaders' samples have come through one."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.ddp import is_ddp
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.roles import of_loader
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk

CHAINS = ("Compose", "Sequential", "AugmentationSequential", "ImageSequential")
Wanted = Callable[[Program, ast.Call], bool]


def normalises(program: Program, call: ast.Call) -> bool:
    """Normalize(mean, std) of a library, a lambda that does it, and presets that resize, crop and normalise."""
    name = last_name(call.func)
    if definition(program, call.func) is not None:
        return False
    if name == "Lambda" and call.args and isinstance(call.args[0], ast.Lambda):
        return by_hand(program, call.args[0].body)
    return (name == "Normalize" and not _inverse(call)) or _preset(program, call)


def _inverse(call: ast.Call) -> bool:
    """Normalize([-m / s, ...], [1 / s, ...]), which takes a normalising back, to show an image."""
    parts = [each for arg in [*call.args, *(one.value for one in call.keywords)] for each in walk(arg)]
    return any(isinstance(each, ast.USub | ast.Div) for each in parts)


def _preset(program: Program, call: ast.Call) -> bool:
    """ResNet50_Weights.DEFAULT.transforms(), and timm's create_transform."""
    if last_name(call.func) == "create_transform":
        return qualified(program, call.func).startswith("timm.")
    if last_name(call.func) != "transforms" or not isinstance(call.func, ast.Attribute):
        return False
    return any("Weights" in text_of(each) for each in [call.func.value, *origins(program, call.func.value)])


def scales(program: Program, call: ast.Call) -> bool:
    """ToTensor() and those like it, which bring pixels from 0..255 to 0..1."""
    name = last_name(call.func)
    asked = any(
        each.arg == "scale" and isinstance(each.value, ast.Constant) and each.value.value for each in call.keywords
    )
    return definition(program, call.func) is None and (name == "ToTensor" or (name == "ToDtype" and asked))


def by_hand(program: Program, node: ast.AST) -> bool:
    """(x - mean) / std, x.sub_(mean).div_(std), and `x = x - mean` right above `x = x / std`."""
    match node:
        case ast.BinOp(left=ast.BinOp(op=ast.Sub(), right=mean), op=ast.Div(), right=std):
            if isinstance(mean, ast.Constant) and isinstance(std, ast.Constant):
                return 0 < float(mean.value if isinstance(mean.value, float) else 0) < 1
            own = any(isinstance(each, ast.Call) and last_name(each.func) in ("mean", "std") for each in walk(node))
            return not own and _named(program, mean, std)
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr=first), args=[mean]), attr=second), args=[std]
        ):
            return first in ("sub", "sub_") and second in ("div", "div_") and _named(program, mean, std)
        case ast.Assign() | ast.AugAssign() | ast.Expr():
            subtracted, divided = (
                _changed(_line_before(program, node), ast.Sub, "sub_"),
                _changed(node, ast.Div, "div_"),
            )
            same = subtracted is not None and divided is not None and subtracted[0] == divided[0]
            return same and _named(program, subtracted[1], divided[1])  # type: ignore[index]
    return False


def _line_before(program: Program, node: ast.stmt) -> ast.stmt | None:
    block = getattr(program.owner[node].parents[node], "body", [])
    place = block.index(node) if isinstance(block, list) and node in block else 0
    found = block[place - 1] if place else None
    return found if isinstance(found, ast.stmt) else None


def _changed(node: ast.stmt | None, operator: type[ast.operator], name: str) -> tuple[str, ast.expr] | None:
    """`x = x - m`, `x -= m`, `x.sub_(m)`: what is changed, and by what."""
    match node:
        case ast.AugAssign(target=ast.Name(id=target), op=op, value=value) if isinstance(op, operator):
            return target, value
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.BinOp(left=ast.Name(id=left), op=op, right=right)) if (
            isinstance(op, operator) and left == target
        ):
            return target, right
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=target), attr=attr), args=[value])):
            return (target, value) if attr == name else None
    return None


def _named(program: Program, mean: ast.AST, std: ast.AST) -> bool:
    """Whether two values go by the names of a mean and a deviation, by their own or by those that they are made of."""
    found = []
    for node, word in ((mean, "mean"), (std, "std")):
        plain = isinstance(node, ast.Name | ast.Attribute) and word not in text_of(node).lower()
        made = [node, *(origins(program, node) if plain else [])]
        made = [e for e in made if not (isinstance(e, ast.Call) and last_name(e.func) in ("mean", "std"))]
        found.append(any(re.search(rf"(^|[^a-z]){word}|{word}s?$", text_of(each).lower()) for each in made))
    return all(found)


def steps(program: Program, node: ast.AST, wanted: Wanted, depth: int = 0) -> list[ast.Call]:
    """The wanted steps that a transform takes one after the other; of several ways the one with the most of them."""
    if depth > 6:
        return []
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [each for part in parts for each in steps(program, part, wanted, depth + 1)]
        case ast.Starred(value=inner):
            return steps(program, inner, wanted, depth + 1)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return steps(program, left, wanted, depth + 1) + steps(program, right, wanted, depth + 1)
        case ast.Name(id=name):
            grown = _grown(program, node, name)
            added = [each for part in grown for each in steps(program, part, wanted, depth + 1)]
            written = [each.value for each in bindings(program, node, name) if each.kind == "value" and each.value]
            ways = [each for each in (written if grown else origins(program, node)) if each is not node]
            return _most([steps(program, each, wanted, depth + 1) for each in ways]) + added
        case ast.Call():
            if definition(program, node.func) is None:
                return _of_call(program, node, wanted, depth)
    made = [each for each in origins(program, node) if each is not node]
    return _most([steps(program, each, wanted, depth + 1) for each in made])


def _of_call(program: Program, call: ast.Call, wanted: Wanted, depth: int) -> list[ast.Call]:
    if wanted(program, call):
        return [call]
    if last_name(call.func) in CHAINS:
        given = [*call.args, *(each.value for each in call.keywords if each.arg == "transforms")]
        return [each for part in given for each in steps(program, part, wanted, depth + 1)]
    if is_ddp(program, call) and call.args:
        return steps(program, call.args[0], wanted, depth + 1)
    made = [each for each in origins(program, call) if each is not call]
    return _most([steps(program, each, wanted, depth + 1) for each in made])


def _most(ways: list[list[ast.Call]]) -> list[ast.Call]:
    return max(ways, key=len, default=[])


def _grown(program: Program, node: ast.Name, name: str) -> list[ast.AST]:
    """What is added to a list of this name on every way: `steps += [...]`, `steps.append(x)`, `steps.extend(...)`."""
    source = program.owner[node]
    bound = bindings(program, node, name)
    scopes = {source.scopes.get(each.node) for each in bound}
    found: list[tuple[ast.AST, ast.AST]] = [
        (each.node, each.value) for each in bound if each.kind == "aug" and each.value is not None
    ]
    for method in ("append", "extend", "insert"):
        for call in program.named.get(method, []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            here = program.owner[call] is source and source.scopes[call] in scopes
            if here and isinstance(owner, ast.Name) and owner.id == name and call.args:
                found.append((call, call.args[-1]))
    return [
        value
        for place, value in found
        if not any(isinstance(outer, ast.If | ast.For) for outer in _within(above(source, place)))
    ]


def _within(outer: Iterator[ast.AST]) -> Iterator[ast.AST]:
    for each in outer:
        if isinstance(each, Function | ast.Lambda):
            return
        yield each


@remembered
def comes_through(program: Program, loader: ast.Call, wanted: Wanted) -> bool:
    """Whether all that a loader may read has come through a wanted step of its data set's transform."""
    node = of_loader(program, loader, "dataset")
    return node is not None and of_set(program, node, wanted)


def of_set(program: Program, node: ast.AST, wanted: Wanted, depth: int = 0) -> bool:
    """Whether all data sets that this may be take a wanted step, in their own transform or in their part's."""
    made = [each for each in origins(program, node) if isinstance(each, ast.Call)]
    return bool(made) and depth < 6 and all(_takes(program, each, wanted, depth) for each in made)


def _takes(program: Program, call: ast.Call, wanted: Wanted, depth: int) -> bool:
    given = [*call.args, *(each.value for each in call.keywords)]
    if last_name(call.func) == "random_split":
        given = given[:1]
    own = definition(program, call.func)
    if isinstance(own, ast.ClassDef):
        inner = [each for each in walk(own) if isinstance(each, ast.Call) and last_name(each.func) in CHAINS]
        given = [*given, *inner]
    return any(steps(program, each, wanted) or of_set(program, each, wanted, depth + 1) for each in given)
