"""Local samplers: what their order goes by, and whether that changes from epoch to epoch."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import definition, lineage, method
from lockstep.commands.lint.guards import guard
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_first, rank_like
from lockstep.commands.lint.roles import SHARDING, constant, given, of_loader, samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.tree import text_of, walk


def own_epochs(program: Program, loader: ast.Call) -> Iterator[ast.Call]:
    """A local sampler, or iterable set, whose order goes by self.epoch, which nothing sets but its own __init__."""
    for call, owner in _of_local_classes(program, loader):
        if any(last_name(base) in SHARDING for each in lineage(program, owner) for base in each.bases):
            ordered = constant(program, given(program, call, "shuffle")) is False or "shuffle=False" in text_of(owner)
            if not ordered and not _set_elsewhere(program, owner, "epoch"):
                yield call
            continue
        order, setter = method(program, owner, "__iter__"), method(program, owner, "set_epoch")
        names = {"epoch"} | {
            each.attr
            for each in (walk(setter) if setter is not None else [])
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        }
        inner = list(walk(order)) if order is not None else []
        used = {each.attr for each in inner if isinstance(each, ast.Attribute)} & names
        if used and not any(_set_elsewhere(program, owner, name) for name in used):
            yield call


def _of_local_classes(program: Program, loader: ast.Call) -> Iterator[tuple[ast.Call, ast.ClassDef]]:
    """The sampler and the data set of a loader that are objects of local classes."""
    node = of_loader(program, loader, "dataset")
    for call in [*samplers(program, loader), *(origins(program, node) if node is not None else [])]:
        owner = definition(program, call.func) if isinstance(call, ast.Call) else None
        if isinstance(call, ast.Call) and isinstance(owner, ast.ClassDef):
            yield call, owner


def _set_elsewhere(program: Program, owner: ast.ClassDef, name: str) -> bool:
    """Whether an attribute of a sampler is set by more than its own __init__ and set_epoch."""
    family = lineage(program, owner)
    for source in program.sources:
        for text, bound in source.attributes.items():
            if not text.endswith(f".{name}"):
                continue
            for each in bound:
                own = class_of(source, each.node) in family
                here = getattr(function_of(source, each.node), "name", "")
                if own and here not in ("__init__", "set_epoch"):
                    return True
                if text != f"self.{name}" and not _of_another(program, each.node, name, family):
                    return True
    return False


def _of_another(program: Program, statement: ast.AST, name: str, family: list[ast.ClassDef]) -> bool:
    """Whether a statement sets an attribute of this name of objects of other local classes alone."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    parts = [each for target in targets if target is not None for each in walk(target)]
    owners = [each.value for each in parts if isinstance(each, ast.Attribute) and each.attr == name]
    made = [one for each in owners for one in origins(program, each)]
    classes = [definition(program, each.func) if isinstance(each, ast.Call) else None for each in made]
    return bool(classes) and all(isinstance(each, ast.ClassDef) and each not in family for each in classes)


def same_draw(program: Program, loader: ast.Call) -> Iterator[Hit]:
    """A local sampler whose generator gets the same seed each time that it is asked for an order."""
    for _, owner in _of_local_classes(program, loader):
        order = method(program, owner, "__iter__")
        drawn = [each for each in walk(order) if isinstance(each, ast.Call)] if order is not None else []
        if not any(last_name(each.func) in ("randperm", "permutation", "shuffle", "multinomial") for each in drawn):
            continue
        for call in drawn:
            seeds = last_name(call.func) in ("manual_seed", "default_rng", "RandomState", "Random", "seed")
            if seeds and call.args and _never_changes(program, owner, call.args[0]):
                yield Hit(call, "the same seed for each epoch's order")
                break


def _never_changes(program: Program, owner: ast.ClassDef, seed: ast.expr) -> bool:
    """Whether a seed is made of attributes of self that __init__ alone sets, and constants beside them."""
    names = []
    for each in walk(seed):
        if isinstance(each, ast.Call | ast.Subscript) or (isinstance(each, ast.Name) and each.id != "self"):
            return False
        if isinstance(each, ast.Attribute):
            names.append(each.attr)
    home = program.owner[owner]
    known = bool(names) and all(f"self.{name}" in home.attributes for name in names)
    setter = method(program, owner, "set_epoch")
    told = {each.attr for each in walk(setter) if isinstance(each, ast.Attribute)} if setter is not None else set()
    return known and not told & set(names) and not any(_set_elsewhere(program, owner, name) for name in names)


def told_to_one(program: Program, call: ast.Call) -> bool:
    """Whether a set_epoch stands under `if rank == 0:`, so that the other ranks keep the first order."""
    condition = guard(program, call)
    if not isinstance(condition, ast.If) or not any(call in walk(each) for each in condition.body):
        return False
    beside = [each for part in condition.orelse for each in walk(part) if isinstance(each, ast.Call)]
    if any(last_name(each.func) == "set_epoch" for each in beside):
        return False
    match condition.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            return rank_like(program, left)
        case ast.Name() | ast.Attribute() | ast.Call():
            name = last_name(condition.test.func if isinstance(condition.test, ast.Call) else condition.test)
            return is_first(name.lower())
    return False
