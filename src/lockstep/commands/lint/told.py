"""Where the numbers that a loop adds up are told: printed, logged, written."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import instance_of
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import added_up, is_telling, mentions, own_nodes, reduces, root_name, tainted
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, remembered
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk

_NUMBER = re.compile(r"loss|correct|argmax|==|accuracy")


def told_after(program: Program, loop: Loop) -> Iterator[ast.Call]:
    """The calls that print or log what a loop added up, once it is over: in its function, or in that one's callers."""
    nodes = own_nodes(program, loop)
    names = tainted(nodes, added_up(loop) - alike(loop))
    within = set(walk(loop))
    last = loop.end_lineno or 0
    for each in nodes:
        if (
            is_telling(each)
            and isinstance(each, ast.Call)
            and each not in within
            and each.lineno > last
            and mentions(each, names)
        ):
            yield each
    function = function_of(program.owner[loop], loop)
    if function is None or not _returns_any(function, names):
        return
    for site in sites(program, function):
        around = own_nodes(program, site.call)
        kept = tainted(around, _kept(program, around, site.call))
        if any(reduces(program, node) and mentions(node, kept) for node in around):
            continue
        for node in around:
            telling = isinstance(node, ast.Call) and is_telling(node)
            if isinstance(node, ast.Call) and telling and (_tells(program, node, site.call) or _has(node, kept)):
                yield node


def _has(call: ast.Call, names: set[str]) -> bool:
    return any(mentions(part, names) for part in call.args)


def _kept(program: Program, nodes: list[ast.AST], call: ast.Call) -> set[str]:
    """The lists and dictionaries that a call's result is put into."""
    found = set()
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="append" | "update"), args=[given]):
                if not isinstance(value, ast.Call) and depends(program, given, lambda each: each is call):
                    found.add(root_name(value))
    return found - {"", "self"}


_SAME_ON_ALL = re.compile(r"^len\(|\.(size|numel)\(|\.shape\b|batch_?size|^bsz?$|time|perf_counter|elapsed|^\d+$")


def alike(loop: Loop) -> set[str]:
    """The names that a loop only adds times, sizes and constants to: no one asks for their sum over the ranks."""
    raised: dict[str, list[ast.expr]] = {}
    bound: dict[str, list[ast.expr]] = {}
    for node in walk(loop):
        match node:
            case ast.AugAssign(target=target, value=value):
                raised.setdefault(root_name(target), []).append(value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp() as value):
                raised.setdefault(name, []).append(value)
            case ast.Call(func=ast.Attribute(value=value), args=[given, *_]):
                raised.setdefault(root_name(value), []).append(given)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            bound.setdefault(node.targets[0].id, []).append(node.value)

    def same(value: ast.expr) -> bool:
        made = bound.get(value.id, []) if isinstance(value, ast.Name) else []
        return all(map(_same_on_all, made or [value]))

    return {name for name, values in raised.items() if all(map(same, values))}


def _same_on_all(value: ast.expr) -> bool:
    """A time, a size, a constant: of a product each factor, for loss * len(y) is no size."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        return _same_on_all(value.left) and _same_on_all(value.right)
    return bool(_SAME_ON_ALL.search(text_of(value)))


def is_result(node: ast.AST) -> bool:
    """A loss, or what was right: a comparison, or a call that is named so."""
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.Eq) and not isinstance(node.comparators[0], ast.Constant)
    return isinstance(node, ast.Call) and bool(_NUMBER.search(text_of(node.func)))


def _returns_any(function: Function, names: set[str]) -> bool:
    return any(isinstance(each, ast.Return) and each.value and mentions(each.value, names) for each in walk(function))


def _tells(program: Program, node: ast.Call, call: ast.Call) -> bool:
    return any(
        depends(program, part, lambda each: each is call)
        for part in [*node.args, *(each.value for each in node.keywords)]
        if not isinstance(part, ast.Constant)
    )


def told_by_objects(program: Program, loop: Loop) -> Iterator[ast.Call]:
    """The calls that tell what a loop's passes add to an object's attribute, in another method of its class."""
    for _, names, nodes in in_objects(program, loop):
        yield from (each for each in nodes if isinstance(each, ast.Call) and is_telling(each) and mentions(each, names))
    for attribute, names, nodes in read_outside(program, loop):
        for each in nodes:
            if isinstance(each, ast.Call) and is_telling(each) and (attribute in walk(each) or mentions(each, names)):
                yield each


def in_objects(program: Program, loop: Loop) -> Iterator[tuple[Function, set[str], list[ast.AST]]]:
    """The methods that read what a loop's passes add to an attribute: the method, the names there, and its nodes.

    Nothing of a class one of whose methods reduces that attribute, or returns it: whoever asks for it may reduce it.
    """
    within = set(inside(program, loop))
    here = function_of(program.owner[loop], loop)
    for owner, name in sorted(_attributes(program, loop), key=lambda each: (each[0].lineno, each[1])):
        methods = [each for each in owner.body if isinstance(each, Function)]
        known = [(each, tainted(nodes, {name}), nodes) for each in methods for nodes in [list(walk(each))]]
        reduced = any(reduces(program, node) for _, names, nodes in known for node in nodes if mentions(node, names))
        if not reduced and not any(name in _returned(each) for each in methods):
            yield from (each for each in known if each[0] not in within and each[0] is not here)


@remembered
def read_outside(program: Program, loop: Loop) -> list[tuple[ast.Attribute, set[str], list[ast.AST]]]:
    """Where others than its class read what a loop's passes add to an object's attribute: `run.total`.

    With the names that are computed from it there, and the nodes of the function around.
    """
    found = list[tuple[ast.Attribute, set[str], list[ast.AST]]]()
    wanted = {(owner, name.removeprefix("self.")) for owner, name in _attributes(program, loop)}
    for node in [each for source in program.sources if wanted for each in source.of(ast.Attribute)]:
        owner = next((owner for owner, name in wanted if name == node.attr), None)
        if owner is None or isinstance(node.ctx, ast.Store) or class_of(program.owner[node], node) is owner:
            continue
        if instance_of(program, node.value) is owner:
            nodes = own_nodes(program, node)
            held = [each for each in nodes if isinstance(each, ast.Assign) and node in walk(each.value)]
            parts = [part for each in held for target in each.targets for part in walk(target)]
            names = {root_name(each) for each in parts if isinstance(each, ast.Name | ast.Attribute)} - {"", "self"}
            found.append((node, tainted(nodes, names) if names else names, nodes))
    return found


def _attributes(program: Program, loop: Loop) -> set[tuple[ast.ClassDef, str]]:
    """The classes and attributes that a loop's passes add a loss or a count of hits to."""
    found = set()
    for node in inside(program, loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            name, owner = root_name(node.target), class_of(program.owner[node], node)
            if owner is not None and name.startswith("self.") and re.search(_NUMBER, text_of(node.value)):
                found.add((owner, name))
    return found


def _returned(function: Function) -> set[str]:
    """The attributes of self that a method returns, or makes other attributes from."""
    return {
        root_name(part)
        for each in walk(function)
        if isinstance(each, ast.Return) and each.value is not None
        for part in walk(each.value)
        if isinstance(part, ast.Attribute)
    }
