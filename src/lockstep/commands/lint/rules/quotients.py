"""A rank's own mean, correct / total, that is put together with the other ranks' as if all were of one size."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.flow import added_up, mentions, own_nodes, reduces, root_name
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside, loaders_of
from lockstep.commands.lint.program import Program, bindings
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import samplers
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Binding, Function, Loop
from lockstep.commands.lint.tree import walk


def means_of_shares(program: Program, loop: Loop, nodes: list[ast.AST], counts: set[str]) -> Iterator[Hit]:
    """A rank's own mean handed to a reduction, of shares that a script cuts itself: they are of unequal sizes.

    `counts`: the sums that such a mean is divided by.
    """
    names = added_up(loop)
    for node in nodes:
        if isinstance(node, ast.Call) and reduces(program, node):
            for part in _given(node):
                quotients = [
                    made
                    for made in _made(program, part)
                    if _is_quotient(made, names, counts) or (counts == names and _of_own_set(program, made, loop))
                ]
                beside = [*(each for each in _given(node) if each is not part), *_entries(part)]
                if quotients and not any(
                    mentions(each, names) and not _is_quotient(each, names, names) for each in beside
                ):
                    yield Hit(node)
                    return
    yield from _returned_means(program, loop, names, counts)


def counts_of_some(loop: Loop) -> set[str]:
    """The sums of a loop that count some samples of each batch alone, as `seen += real.sum()`: the ranks' differ."""
    found = set()
    for node in walk(loop):
        match node:
            case ast.AugAssign(op=ast.Add(), target=target, value=value) if name := root_name(target):
                while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
                    if value.func.attr == "sum" and isinstance(value.func.value, ast.Name):
                        found.add(name)
                    value = value.func.value
    return found


def means_of_meters(program: Program, loop: Loop) -> Iterator[Hit]:
    """A rank's own mean that an object reduces, of sums that the loop's passes add to it: a meter's total / count."""
    for owner, names in _sums_of_objects(program, loop).items():
        for method in [each for each in owner.body if isinstance(each, Function)]:
            for node in walk(method):
                if not (isinstance(node, ast.Call) and reduces(program, node)):
                    continue
                if any(_is_quotient(made, names, names) for part in _given(node) for made in _made(program, part)):
                    yield Hit(node)


def _sums_of_objects(program: Program, loop: Loop) -> dict[ast.ClassDef, set[str]]:
    """The local classes to whose attributes a loop's passes add -> these attributes."""
    found: dict[ast.ClassDef, set[str]] = {}
    for node in inside(program, loop):
        match node:
            case ast.AugAssign(op=ast.Add(), target=ast.Attribute() as target):
                pass
            case ast.Assign(targets=[ast.Attribute() as target], value=ast.BinOp(op=ast.Add(), left=left)):
                if root_name(left) != root_name(target):
                    continue
            case _:
                continue
        owner = class_of(program.owner[node], node)
        if owner is not None and root_name(target).startswith("self."):
            found.setdefault(owner, set()).add(root_name(target))
    return found


def _returned_means(program: Program, loop: Loop, names: set[str], counts: set[str]) -> Iterator[Hit]:
    """world_mean(evaluate(...)), where evaluate returns a quotient of its own sums."""
    function = function_of(program.owner[loop], loop)
    values = returns(program, function) if function is not None else []
    means = [
        value for value in values if value and any(_is_quotient(each, names, counts) for each in _made(program, value))
    ]
    if function is None or not means or len(means) < len(values) or any(isinstance(v, ast.Tuple) for v in means):
        return
    for site in sites(program, function):
        for node in own_nodes(program, site.call):
            if (
                isinstance(node, ast.Call)
                and node is not site.call
                and reduces(program, node)
                and len(_given(node)) == 1
                and any(site.call in walk(made) for made in _made(program, _given(node)[0]))
            ):
                yield Hit(node)
                return


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _entries(node: ast.expr) -> list[ast.expr]:
    """The values of a tuple, list or dictionary that is written out: (mean, count) is a mean with its weight."""
    if isinstance(node, ast.Tuple | ast.List):
        return node.elts
    return node.values if isinstance(node, ast.Dict) else []


def _made(program: Program, node: ast.expr) -> Iterator[ast.AST]:
    """A value, and what the names in it were bound to."""
    yield node
    for name in walk(node):
        if isinstance(name, ast.Name):
            yield from (each.value for each in _bound(program, name) if each.value is not None)


def _of_own_set(program: Program, node: ast.AST, loop: Loop) -> bool:
    """correct / len(loader.dataset), of a loader whose set is the rank's share."""
    names = added_up(loop)
    for each in walk(node):
        match each:
            case ast.BinOp(
                left=left,
                op=ast.Div(),
                right=ast.Call(func=ast.Name(id="len"), args=[ast.Attribute(value=loader, attr="dataset")]),
            ) if mentions(left, names):
                made = [one for one in origins(program, loader) if isinstance(one, ast.Call)]
                return bool(made) and all(
                    one in loaders_of(program, loop) and not samplers(program, one) for one in made
                )
    return False


def _is_quotient(node: ast.AST, names: set[str], counts: set[str]) -> bool:
    """Whether a value holds correct / total, both of the loop's sums."""
    return any(
        isinstance(each, ast.BinOp)
        and isinstance(each.op, ast.Div)
        and mentions(each.left, names)
        and mentions(each.right, counts)
        for each in walk(node)
    )


def _bound(program: Program, node: ast.expr) -> list[Binding]:
    return [b for b in bindings(program, node, node.id) if b.kind == "value"] if isinstance(node, ast.Name) else []
