"""The rule about means of means."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.flow import added_up, mentions, own_nodes, root_name, tainted
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loaders_of
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.reduced import is_reduced
from lockstep.commands.lint.roles import constant, of_loader, sharding
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.batch_means import is_mean, mean_of_list
from lockstep.commands.lint.rules.by_lightning import uneven_means
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.rules.lightning_lists import listed_means
from lockstep.commands.lint.rules.metrics import shared_loops
from lockstep.commands.lint.rules.quotients import counts_of_some, means_of_meters, means_of_shares
from lockstep.commands.lint.sites import default
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS203",
    "mean-of-means",
    "means over unequal batches are averaged",
    result="samples of the short last batch count more than the others: with 10,000 images in batches of 256, 16 "
    "images 16 times",
    why="each batch's mean counts once, whatever its size, before and after the ranks' are averaged",
    mend="total += loss.detach() * len(labels)\ncount += "
    "len(labels)\n...\ndist.all_reduce(total)\ndist.all_reduce(count)\nmean = total / count",
)
def mean_of_means(program: Program) -> Iterator[Hit]:
    """Batches' means added up unweighted, divided by the number of batches, and reduced."""
    yield from uneven_means(program)
    yield from listed_means(program)
    for loop, cut in shared_loops(program):
        if any(
            constant(program, of_loader(program, each, "drop_last")) is True or prepared(program, each) for each in cut
        ):
            continue
        if not is_reduced(program, loop):
            continue
        nodes = own_nodes(program, loop)
        if not any(sharding(program, each) for each in cut):
            yield from means_of_shares(program, loop, nodes, added_up(loop))
            yield from means_of_meters(program, loop)
        elif picked := counts_of_some(loop):
            yield from means_of_shares(program, loop, nodes, picked)
        for name, place in _unweighted(program, loop):
            names = tainted(nodes, {name})
            for node in nodes:
                if (
                    _divides_by_batches(program, node, names, loop)
                    or mean_of_list(node, place)
                    or _sum_beside_count(program, node, names, loop)
                ):
                    yield Hit(place)
                    break
        yield from (Hit(node) for node in [*_metered(program, loop), *_running(program, loop)])


def _divides_by_batches(program: Program, node: ast.AST, names: set[str], loop: Loop) -> bool:
    """total / len(loader)."""
    match node:
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            return mentions(left, names) and _counts_batches(program, right, loop)
    return False


def _sum_beside_count(program: Program, node: ast.AST, names: set[str], loop: Loop) -> bool:
    """torch.tensor([total, len(loader)]): handed on to be reduced and divided, with no number of samples beside."""
    match node:
        case ast.Call(args=[ast.List(elts=[total, count]) | ast.Tuple(elts=[total, count]), *_]):
            return mentions(total, names) and _counts_batches(program, count, loop)
    return False


def _metered(program: Program, loop: Loop) -> Iterator[ast.Call]:
    """meter.update(loss.item()), of a meter that counts it as one sample: `def update(self, value, n=1)`."""
    for node in walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(attr="update" | "add"), args=[value], keywords=[]) if is_mean(
                program, value
            ):
                function = callee(program, node)
                counts = function.args.args[2:] if function is not None else []
                size = default(function, counts[0].arg) if function is not None and len(counts) == 1 else None
                if isinstance(size, ast.Constant) and size.value == 1:
                    yield node


def _running(program: Program, loop: Loop) -> Iterator[ast.AugAssign]:
    """mean += (loss - mean) / n, of which n counts the batches."""
    for node in walk(loop):
        match node:
            case ast.AugAssign(
                op=ast.Add(),
                target=target,
                value=ast.BinOp(left=ast.BinOp(left=value, op=ast.Sub(), right=right), op=ast.Div(), right=count),
            ) if text_of(right) == text_of(target):
                if is_mean(program, value) and _counts_batches(program, count, loop):
                    yield node


def _unweighted(program: Program, loop: Loop) -> Iterator[tuple[str, ast.AST]]:
    """`total += loss.item()`, or a list of such, where the loss is a mean over the batch."""
    for node in walk(loop):
        match node:
            case ast.AugAssign(op=ast.Add(), target=target, value=value) if name := root_name(target):
                pass
            case ast.Call(func=ast.Attribute(value=holder, attr="append"), args=[value]) if name := root_name(holder):
                pass
            case _:
                continue
        if is_mean(program, value):
            yield name, node


def _counts_batches(program: Program, node: ast.expr, loop: Loop) -> bool:
    """len(loader), a number that the loop raises by one, or its pass's number and one; as a tensor or a float too."""
    while isinstance(node, ast.Call) and last_name(node.func) in ("tensor", "as_tensor", "float", "int") and node.args:
        node = node.args[0]
    match node:
        case ast.BinOp(left=ast.Name(id=name), op=ast.Add(), right=ast.Constant(value=1)):
            targets = loop.target.elts[:1] if isinstance(loop, ast.For) and isinstance(loop.target, ast.Tuple) else []
            numbered = (
                isinstance(loop, ast.For)
                and isinstance(loop.iter, ast.Call)
                and last_name(loop.iter.func) == "enumerate"
            )
            return numbered and any(isinstance(each, ast.Name) and each.id == name for each in targets)
    for each in [node, *origins(program, node)]:
        if isinstance(each, ast.Call) and last_name(each.func) == "len" and each.args:
            made = [one for one in origins(program, each.args[0]) if one in loaders_of(program, loop)]
            if made:
                return True
    return isinstance(node, ast.Name | ast.Subscript | ast.Attribute) and any(
        isinstance(each, ast.AugAssign)
        and text_of(each.target) == text_of(node)
        and isinstance(each.value, ast.Constant)
        and each.value.value == 1
        for each in walk(loop)
    )
