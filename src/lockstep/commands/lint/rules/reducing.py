"""Rules about a reduction and what is done with its result."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.flow import added_up, is_reduced, is_reduction, mentions, own_nodes, tainted
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loaders_of
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.roles import constant, of_loader, sharding
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_lightning import uneven_means
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.rules.metrics import shared_loops
from lockstep.commands.lint.source import Binding, Function, Loop, function_of


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
    for loop, cut in shared_loops(program):
        if any(
            constant(program, of_loader(program, each, "drop_last")) is True or prepared(program, each) for each in cut
        ):
            continue
        if not is_reduced(program, loop):
            continue
        nodes = own_nodes(program, loop)
        if not any(sharding(program, each) for each in cut):
            yield from _means_of_shares(program, loop, nodes)
        for name, place in _unweighted(program, loop):
            names = tainted(nodes, {name})
            for node in nodes:
                if (
                    isinstance(node, ast.BinOp)
                    and isinstance(node.op, ast.Div)
                    and mentions(node.left, names)
                    and _counts_batches(program, node.right, loop)
                ):
                    yield Hit(place)
                    break


def _means_of_shares(program: Program, loop: Loop, nodes: list[ast.AST]) -> Iterator[Hit]:
    """A rank's own mean handed to all_reduce, of shares that a script cuts itself: they are of unequal sizes."""
    names = added_up(loop)
    for node in nodes:
        if isinstance(node, ast.Call) and last_name(node.func) in ("all_reduce", "allreduce", "reduce") and node.args:
            for made in [node.args[0], *(b.value for b in _bound(program, node.args[0]) if b.value is not None)]:
                for each in ast.walk(made):
                    match each:
                        case ast.BinOp(left=left, op=ast.Div(), right=right) if mentions(left, names) and mentions(
                            right, names
                        ):
                            yield Hit(node)
                            return


def _bound(program: Program, node: ast.expr) -> list[Binding]:
    return [b for b in bindings(program, node, node.id) if b.kind == "value"] if isinstance(node, ast.Name) else []


def _unweighted(program: Program, loop: Loop) -> Iterator[tuple[str, ast.AST]]:
    """`total += loss.item()` where the loss is a mean over the batch."""
    for node in ast.walk(loop):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            value = node.value
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not value.args:
                if value.func.attr == "mean":
                    yield node.target.id, node
                value = value.func.value  # .item(), .detach()
            if isinstance(value, ast.Call) and re.search(r"loss|criterion|cross_entropy", ast.unparse(value.func)):
                if not _sums(program, value) and "size" not in ast.unparse(node.value):
                    yield node.target.id, node
                continue
            if not isinstance(value, ast.Name) or "loss" not in value.id.lower():
                continue
            made = [each for each in origins(program, value) if isinstance(each, ast.Call)]
            if made and not any(_sums(program, each) for each in made) and len(made) == len(origins(program, value)):
                yield node.target.id, node


def _sums(program: Program, call: ast.Call) -> bool:
    """Whether a loss is asked for its sum."""
    calls = [call, *(each for each in origins(program, call.func) if isinstance(each, ast.Call))]
    return any(
        keyword.arg == "reduction" and constant(program, keyword.value) != "mean"
        for each in calls
        for keyword in each.keywords
    )


def _counts_batches(program: Program, node: ast.expr, loop: Loop) -> bool:
    """len(loader), or a number that the loop raises by one."""
    for each in [node, *origins(program, node)]:
        if isinstance(each, ast.Call) and last_name(each.func) == "len" and each.args:
            made = [one for one in origins(program, each.args[0]) if one in loaders_of(program, loop)]
            if made:
                return True
    return isinstance(node, ast.Name) and any(
        isinstance(each, ast.AugAssign)
        and isinstance(each.target, ast.Name)
        and each.target.id == node.id
        and isinstance(each.value, ast.Constant)
        and each.value.value == 1
        for each in ast.walk(loop)
    )


@rule(
    "LS206",
    "reduced-result-dropped",
    "the reduced value is computed and dropped",
    result="what is printed, logged or compared is this rank's own number, as if nothing had been reduced",
    why="the call returns the reduced value, and leaves its argument as it is",
    mend="loss = reduce_mean(loss)",
)
def reduced_result_dropped(program: Program) -> Iterator[Hit]:
    """A reduction that returns its result, as a statement of its own; a reduced name that nothing reads."""
    for call in program.calls:
        source = program.owner[call]
        returns_it = _returns_reduced(program, call)
        parent = source.parents[call]
        if (
            isinstance(parent, ast.Expr)
            and not _is_a_wait(call)
            and (returns_it or _of_a_copy(program, call) or _never_read(program, call))
        ):
            yield Hit(call)
        elif returns_it and isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            name = parent.targets[0].id
            nodes = own_nodes(program, call)
            read = any(
                isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load) for each in nodes
            )
            same = {each.id for argument in call.args for each in ast.walk(argument) if isinstance(each, ast.Name)}
            if not read and function_of(source, call) is not None and name.strip("_") and name not in same:
                yield Hit(call)


def _never_read(program: Program, call: ast.Call) -> bool:
    """all_reduce(t) of a tensor that was made for it, and that nothing reads afterwards."""
    first = call.args[0] if call.args else None
    if last_name(call.func) != "all_reduce" or not isinstance(first, ast.Name) or definition(program, call.func):
        return False
    found = bindings(program, first, first.id)
    values = [each.value for each in found]
    fresh = ("tensor", "as_tensor", "clone", "stack")
    if not values or not all(isinstance(each, ast.Call) and last_name(each.func) in fresh for each in values):
        return False
    if any(isinstance(each, ast.Call) and _is_empty(each) for each in values):
        return False
    reads = [
        each
        for each in own_nodes(program, call)
        if isinstance(each, ast.Name) and each.id == first.id and isinstance(each.ctx, ast.Load) and each is not first
    ]
    return not reads


def _is_empty(call: ast.Call) -> bool:
    """Whether a tensor is made of constants."""
    return not any(isinstance(each, ast.Name) and each.id not in ("torch", "device") for each in ast.walk(call))


def _is_a_wait(call: ast.Call) -> bool:
    """Whether a collective over nothing stands for a barrier."""
    first = call.args[0] if call.args else None
    return (
        isinstance(first, ast.Call)
        and last_name(first.func) in ("zeros", "ones", "tensor", "empty")
        and not any(isinstance(each, ast.Name) and each.id not in ("torch", "device") for each in ast.walk(first))
    )


def _returns_reduced(program: Program, call: ast.Call) -> bool:
    """accelerator.gather(x), hvd.allreduce(x), or a local function that reduces a copy and returns it."""
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    name = last_name(call.func)
    if name in ("reduce", "gather", "gather_for_metrics") and "accelerator" in owner:
        return True
    if qualified(program, call.func).startswith("timm.utils.") and name == "reduce_tensor":
        return True
    if (name == "allreduce" and owner == "hvd") or (
        name in ("all_reduce", "all_gather") and owner.endswith(("fabric", "idist"))
    ):
        return True
    function = callee(program, call)
    if function is None:
        return False
    key = ("returns reduced", function)
    if key not in program.memo:
        program.memo[key] = _reduces_a_copy(function)
    return bool(program.memo[key])


def _writes_back(node: ast.AST) -> bool:
    """x[key] = value, x.copy_(value): what was given is changed as well."""
    if isinstance(node, ast.Call) and last_name(node.func) in ("copy_", "update", "fill_"):
        return True
    return isinstance(node, ast.Assign) and any(isinstance(each, ast.Subscript) for each in node.targets)


def _reduces_a_copy(function: Function) -> bool:
    """Whether a function is about a reduction of a copy, and returns it."""
    nodes = list(ast.walk(function))
    if not any(is_reduction(each) for each in nodes):
        return False
    if any(_writes_back(each) for each in nodes):
        return False
    copies = ("clone", "tensor", "as_tensor", "stack")
    copied = any(isinstance(each, ast.Call) and last_name(each.func) in copies for each in nodes)
    returned = any(isinstance(each, ast.Return) and each.value is not None for each in nodes)
    return copied and returned and _one_value(function)


def _one_value(function: Function) -> bool:
    """Whether a function is about a reduction alone: a few statements, no loop over batches."""
    return len(function.body) <= 10 and not any(
        isinstance(each, Loop) and len(each.body) > 6 for each in ast.walk(function)
    )


def _of_a_copy(program: Program, call: ast.Call) -> bool:
    """dist.all_reduce(x.clone()): the copy is reduced, and gone."""
    if (
        last_name(call.func) not in ("all_reduce", "reduce", "broadcast")
        or not call.args
        or definition(program, call.func)
    ):
        return False
    first = call.args[0]
    return isinstance(first, ast.Call) and last_name(first.func) in ("clone", "tensor", "as_tensor")
