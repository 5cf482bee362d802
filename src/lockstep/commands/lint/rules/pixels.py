"""The rule about normalising: pixels that are shifted and stretched on their way more than once."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, sites
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loops, over_loader
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.source import Function, Loop, above


@rule(
    "LS111",
    "normalised-twice",
    "the pixels are normalised twice",
    result="the network sees values shifted and stretched a second time, far from mean 0 and spread 1; pretrained "
    "weights suffer most",
    why="the loader's transform has normalised already",
    mend="normalise in one place: in the transform, or on the device",
)
def normalised_twice(program: Program) -> Iterator[Hit]:
    """Two Normalize in one Compose; or a Normalize, and (x - mean) / std on the batch."""
    normalize = [each for each in program.named.get("Normalize", []) if definition(program, each.func) is None]
    for call in program.named.get("Compose", []):
        parts = call.args[0].elts if call.args and isinstance(call.args[0], ast.List) else []
        made = [each for part in parts for each in origins(program, part) if isinstance(each, ast.Call)]
        twice = [part for part in made if last_name(part.func) == "Normalize" or _of_weights(part)]
        if len(twice) > 1:
            yield Hit(twice[1])
        tensors = [part for part in made if last_name(part.func) == "ToTensor"]
        for part in parts if tensors else []:
            if any(
                isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div) and _is_255(each.right)
                for each in ast.walk(part)
            ):
                yield Hit(part)
    in_compose = [part for call in program.named.get("Compose", []) for part in ast.walk(call)]
    composed = {each for part in in_compose if isinstance(part, ast.expr) for each in origins(program, part)}
    if not any(each in composed or each in in_compose for each in normalize):
        return
    for source in program.sources:
        for node in source.nodes:
            if (
                (_by_hand(node) or _normalises(program, node))
                and _on_batch(program, node)
                and not _chosen(program, node)
            ):
                yield Hit(node)


def _chosen(program: Program, node: ast.AST) -> bool:
    """Whether a place is one of several ways, by a word: `elif kind == "imagenet":`."""
    tests = [each.test for each in above(program.owner[node], node) if isinstance(each, ast.If)]
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str)
        for test in tests
        if isinstance(test, ast.Compare)
        for one in test.comparators
    )


def _normalises(program: Program, node: ast.AST) -> bool:
    """normalize(images, mean, std) of torchvision, or a Normalize that is called."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    if qualified(program, node.func).endswith("functional.normalize") and "torchvision" in qualified(
        program, node.func
    ):
        return True
    calls = origins(program, node.func) if isinstance(node.func, ast.Name | ast.Attribute) else []
    return any(isinstance(each, ast.Call) and last_name(each.func) == "Normalize" for each in calls)


def _of_weights(call: ast.Call) -> bool:
    """ResNet50_Weights.DEFAULT.transforms(): it resizes, crops and normalises."""
    return last_name(call.func) == "transforms" and "Weights" in ast.unparse(call.func)


def _is_255(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in (255, 255.0)


def _by_hand(node: ast.AST) -> bool:
    """(x - mean) / std, x.sub_(mean).div_(std)."""
    match node:
        case ast.BinOp(left=ast.BinOp(op=ast.Sub(), right=mean), op=ast.Div(), right=std):
            if isinstance(mean, ast.Constant) and isinstance(std, ast.Constant):
                return 0 < float(mean.value if isinstance(mean.value, float) else 0) < 1
            own = any(isinstance(each, ast.Call) and last_name(each.func) in ("mean", "std") for each in ast.walk(node))
            return not own and "mean" in ast.unparse(mean).lower() and "std" in ast.unparse(std).lower()
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Attribute(attr=first), args=[mean]), attr=second), args=[std]
        ):
            if first in ("sub", "sub_") and second in ("div", "div_"):
                return "mean" in ast.unparse(mean).lower() and "std" in ast.unparse(std).lower()
    return False


def _on_batch(program: Program, node: ast.AST) -> bool:
    """Whether a place is in a loop over batches, or in a prefetcher."""
    for outer in above(program.owner[node], node):
        if isinstance(outer, Loop) and over_loader(program, outer):
            return True
        if isinstance(outer, ast.ClassDef) and re.search(r"prefetch|loader", outer.name.lower()):
            return True
        if isinstance(outer, Function) and outer.name == "forward":
            return "self." in ast.unparse(node) or isinstance(node, ast.Call)
        if isinstance(outer, Function):
            calls = [site.call for site in sites(program, outer)]
            return any(over_loader(program, path[0]) for call in calls for path in loops(program, call)[:1] if path)
    return False
