"""The rule about normalising: pixels that are shifted and stretched on their way more than once."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loaders_of, loops, over_loader
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import loaders, of_loader, training_loaders
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.chains import (
    CHAINS,
    Wanted,
    by_hand,
    comes_through,
    normalises,
    of_set,
    steps,
)
from lockstep.commands.lint.rules.pixel_range import rescaled
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk


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
    """Two Normalize in one chain; or one in a data set's transform, and a second one on the sample or the batch."""
    for name in CHAINS:
        for call in program.named.get(name, []):
            twice = steps(program, call, normalises) if definition(program, call.func) is None else []
            if len(twice) > 1 and not _part_of(program, call):
                yield Hit(twice[1])
    yield from rescaled(program)
    done = set[ast.AST]()
    # without these nothing could have been the first time
    could = any(program.named.get(name) for name in ("Normalize", "Lambda", "create_transform", "transforms"))
    for source in program.sources:
        for node in source.of(ast.BinOp, ast.Call, ast.Assign, ast.AugAssign, ast.Expr):
            again = _again(program, node) if could else None
            if again is not None and again not in done and not _chosen(program, node) and _before(program, node):
                done.add(again)
                yield Hit(again)


def _part_of(program: Program, call: ast.Call) -> bool:
    """Whether a chain is written within another one, which is looked at as a whole."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in CHAINS for each in above(program.owner[call], call)
    )


def _again(program: Program, node: ast.AST) -> ast.AST | None:
    """The place to tell of, where a node normalises what it is given: by hand, or by a library's transform."""
    if by_hand(program, node):
        words = text_of(node).lower()
        return None if re.search(r"target|label|mask|depth|reward|noise", words) else node
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = qualified(program, node.func)
    if name.endswith("functional.normalize") and "torchvision" in name:
        return node
    if name or last_name(node.func) in CHAINS or not isinstance(node.func, ast.Name | ast.Attribute | ast.Call):
        return None
    for made in origins(program, node.func):
        if isinstance(made, ast.Call) and made is not node and definition(program, made.func) is None:
            if last_name(made.func) == "Normalize" and normalises(program, made):
                return node
            inside = steps(program, made, normalises)
            if inside:
                return inside[0]
    return None


def _before(program: Program, node: ast.AST) -> bool:
    """Whether what comes by a place has been normalised already: by the transform of the set that it is read from."""
    source = program.owner[node]
    for outer in above(source, node):
        if isinstance(outer, Loop) and over_loader(program, outer):
            return _read_through(program, loaders_of(program, outer))
        if isinstance(outer, ast.ClassDef) and re.search(r"prefetch|loader", outer.name.lower()):
            return _read_through(program, list(training_loaders(program)))
        if isinstance(outer, Function):
            return _in_function(program, outer, node)
    return False


def _in_function(program: Program, function: Function, node: ast.AST) -> bool:
    source = program.owner[node]
    if function.name == "forward":
        parts = [each for part in walk(node) if isinstance(part, ast.Name) for each in origins(program, part)]
        own = isinstance(node, ast.Call) or any("self." in text_of(each) for each in [node, *parts])
        owner = class_of(program.owner[node], node)
        name = owner.name if owner is not None else ""
        used = sum(len(re.findall(rf"\b{name}\b", source.text)) for source in program.sources) > 1
        return (
            own and (used or not training_loaders(program)) and _read_through(program, list(training_loaders(program)))
        )
    if function.name == "__getitem__":
        owner = class_of(source, node)
        return owner is not None and _of_own_set(program, owner, node)
    collated = [each for each in loaders(program) if _collates(program, each, function)]
    if collated:
        return all(comes_through(program, each, normalises) for each in collated)
    if function.name in ("on_after_batch_transfer", "training_step"):
        return _read_through(program, loaders(program))
    ways = [path[0] for site in sites(program, function) for path in loops(program, site.call)[:1] if path]
    return any(over_loader(program, each) and _read_through(program, loaders_of(program, each)) for each in ways)


def _read_through(program: Program, known: list[ast.Call]) -> bool:
    """Whether loaders give normalised samples; where none is known, whether all of the program's transforms do."""
    if known:
        return any(comes_through(program, each, normalises) for each in known)
    chains = [call for name in CHAINS[:1] for call in program.named.get(name, [])]
    return bool(chains) and all(steps(program, each, normalises) for each in chains)


def _collates(program: Program, loader: ast.Call, function: Function) -> bool:
    node = of_loader(program, loader, "collate_fn")
    return node is not None and function in (*origins(program, node), definition(program, node))


def _of_own_set(program: Program, owner: ast.ClassDef, node: ast.AST) -> bool:
    """Whether the objects of a data set's class are given a transform, or a set, that normalises already."""
    made = [call for call in program.named.get(owner.name, []) if definition(program, call.func) is owner]
    ways = origins(program, node.func) if isinstance(node, ast.Call) else []
    mine = [*ways, *(step for each in ways for step in steps(program, each, normalises))]

    def others(program: Program, call: ast.Call) -> bool:
        return call not in mine and normalises(program, call)

    return bool(made) and all(_given_normalised(program, call, others) for call in made)


def _given_normalised(program: Program, call: ast.Call, wanted: Wanted) -> bool:
    return any(
        steps(program, each, wanted) or of_set(program, each, wanted)
        for each in [*call.args, *(one.value for one in call.keywords)]
    )


def _chosen(program: Program, node: ast.AST) -> bool:
    """Whether a place is one of several ways, by a word: `elif kind == "imagenet":`."""
    tests = [each.test for each in above(program.owner[node], node) if isinstance(each, ast.If)]
    return any(
        isinstance(one, ast.Constant) and isinstance(one.value, str)
        for test in tests
        if isinstance(test, ast.Compare)
        for one in test.comparators
    )
