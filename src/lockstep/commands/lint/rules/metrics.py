"""Rules about numbers that are told: means of means, and one rank's taken for all ranks'."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import added_up, is_reduced, is_reduction, mentions, own_nodes, tainted, told_after
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import evaluation_loops, loaders_of, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.roles import constant, distributed, given, lightning, of_loader, sharding
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.evaluation import prepared, shared_out
from lockstep.commands.lint.source import Binding, Function, Loop, class_of, function_of


def shared_loops(program: Program) -> Iterator[tuple[Loop, list[ast.Call]]]:
    """The loops over loaders of which each rank has its own part, in training and evaluation."""
    for loop in [*step_loops(program), *evaluation_loops(program)]:
        cut = [each for each in loaders_of(program, loop) if shared_out(program, each)]
        if cut:
            yield loop, cut


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
    "LS204",
    "told-unreduced",
    "one rank's own number is told as the training's",
    result="the epoch's loss is of 1/N of the samples, and jumps when N changes",
    why="each rank adds up its own part, and nothing adds the ranks' sums",
    mend="sums = torch.tensor([total, count], device=device)\ndist.all_reduce(sums)\nmean = (sums[0] / sums[1]).item()",
)
def told_unreduced(program: Program) -> Iterator[Hit]:
    """What a training loop over a shared-out loader adds up, printed or logged after it without a reduction."""
    if distributed(program):
        trained = step_loops(program)
        for loop, _ in shared_loops(program):
            if loop in trained and not is_reduced(program, loop):
                for call in told_after(program, loop):
                    if not _says_own(call):
                        yield Hit(call)
                        break
    yield from _lightning(program)


def _says_own(call: ast.Call) -> bool:
    """Whether what is told says that it is one rank's."""
    text = ast.unparse(call)
    return bool(re.search(r"(local|rank|own|its)\b.{0,20}(loss|acc)|\brank\W", text, re.IGNORECASE))


def _lightning(program: Program) -> Iterator[Hit]:
    """self.log in a validation or test step without sync_dist, on several devices."""
    if not (lightning(program) and distributed(program)):
        return
    for call in program.named.get("log", []) + program.named.get("log_dict", []):
        source = program.owner[call]
        function = function_of(source, call)
        steps = ("validation_step", "test_step", "on_validation_epoch_end", "on_test_epoch_end")
        if function is None or function.name not in steps or class_of(source, call) is None:
            continue
        synced = constant(program, given(program, call, "sync_dist"))
        value = given(program, call, "value", 1)
        metric = value is None or _torchmetric(program, value)
        if (
            isinstance(call.func, ast.Attribute)
            and ast.unparse(call.func.value) == "self"
            and synced in (..., False)
            and not metric
        ) and (given(program, call, "sync_dist") is None or synced is False):
            yield Hit(call)


def _torchmetric(program: Program, value: ast.expr) -> bool:
    """Whether a value is a torchmetrics object, or computed by one: those reduce by themselves."""

    def metric(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return any(isinstance(each, ast.Call) and _is_metric(each) for each in origins(program, node))
        return is_reduction(node)

    return depends(program, value, metric)


def _is_metric(call: ast.Call) -> bool:
    return bool(
        re.search(r"Accuracy|Metric|F1|AUROC|Precision|Recall|MeanSquared|ConfusionMatrix", last_name(call.func))
    )


@rule(
    "LS205",
    "best-by-one-rank",
    "the best model is chosen by one rank's number",
    result="the kept weights are the best on 1/N of the test set; with N, another epoch's are kept",
    why="the compared number is of this rank's samples alone",
    mend="dist.all_reduce(sums)  # before the number is compared",
)
def best_by_one_rank(program: Program) -> Iterator[Hit]:
    """`if accuracy > best` with a number that evaluation made over its own part."""
    for loop, _ in shared_loops(program):
        if is_reduced(program, loop):
            continue
        function = function_of(program.owner[loop], loop)
        names = tainted(own_nodes(program, loop), added_up(loop))
        for source in program.sources:
            for node in source.nodes:
                if isinstance(node, ast.Compare) and "best" in ast.unparse(node).lower():
                    here = (
                        function_of(source, node) is function
                        and program.owner[loop] is source
                        and mentions(node, names)
                    )
                    if here or (function is not None and _comes_from(program, node, function)):
                        yield Hit(node)


def _comes_from(program: Program, node: ast.AST, function: Function) -> bool:
    return depends(program, node, lambda each: isinstance(each, ast.Call) and callee(program, each) is function)


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
            if not read and function_of(source, call) is not None and name != "_" and name not in same:
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
    if (name == "allreduce" and owner == "hvd") or (
        name in ("all_reduce", "all_gather") and owner.endswith(("fabric", "idist"))
    ):
        return True
    function = callee(program, call)
    if function is None or not any(is_reduction(each) for each in ast.walk(function)):
        return False
    copied = any(
        isinstance(each, ast.Call) and last_name(each.func) in ("clone", "tensor", "as_tensor", "stack")
        for each in ast.walk(function)
    )
    return (
        copied
        and any(isinstance(each, ast.Return) and each.value is not None for each in ast.walk(function))
        and _one_value(function)
    )


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
