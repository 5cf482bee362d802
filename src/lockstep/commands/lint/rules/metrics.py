"""Rules about numbers that are told: means of means, and one rank's taken for all ranks'."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import added_up, is_reduced, is_reduction, mentions, own_nodes, tainted, told_after
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import evaluation_loops, loaders_of, step_loops
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import constant, distributed, given, lightning
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.evaluation import shared_out
from lockstep.commands.lint.source import Function, Loop, class_of, function_of


def shared_loops(program: Program) -> Iterator[tuple[Loop, list[ast.Call]]]:
    """The loops over loaders of which each rank has its own part, in training and evaluation."""
    for loop in [*step_loops(program), *evaluation_loops(program)]:
        cut = [each for each in loaders_of(program, loop) if shared_out(program, each)]
        if cut:
            yield loop, cut


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
