"""Rules about learning rate schedules: how often they are stepped."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.learning import is_n
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import LOADERS, loops, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_world
from lockstep.commands.lint.roles import constant, given, library
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_lightning import wrong_interval


def _schedulers(program: Program) -> list[ast.Call]:
    return [
        call
        for call in program.calls
        if ".lr_scheduler." in qualified(program, call.func)
        or re.match(r"get_\w*schedule\w*$|get_scheduler$", last_name(call.func))
    ]


@rule(
    "LS210",
    "scheduler-steps",
    "the scheduler is stepped a wrong number of times",
    result="the rate ends before the training does, or long after it: stepped N times as often, it is over after 1/N "
    "of the epochs",
    why="a schedule counts its step() calls; they have to be as many as it was made for",
    mend="scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))  # and one step() a batch",
)
def scheduler_steps(program: Program) -> Iterator[Hit]:
    """step() per batch and per epoch; per batch with a count of epochs; once a process."""
    training = step_loops(program)
    yield from wrong_interval(program)
    for scheduler in _schedulers(program):
        in_batch, in_epoch = [], []
        for call in program.named.get("step", []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if owner is None or scheduler not in origins(program, owner):
                continue
            for path in loops(program, call):
                if any(loop in training for loop in path):
                    in_batch.append(call)
                elif path:
                    in_epoch.append(call)
                if path and isinstance(path[0], ast.For) and _runs_over_ranks(path[0]):
                    yield Hit(call, "once for each process")
                    return
        if in_batch and in_epoch and not set(in_batch) & set(in_epoch):
            yield Hit(in_epoch[0], "after each batch and after each epoch")
        elif in_batch and _counts_epochs(program, scheduler):
            yield Hit(in_batch[0], "after each batch, made for epochs")
        elif in_epoch and not in_batch and last_name(scheduler.func) == "OneCycleLR":
            yield Hit(in_epoch[0], "OneCycleLR counts batches")
        elif in_batch and _already_shared(program, scheduler):
            yield Hit(scheduler, "prepared by Accelerate, which steps it once for each process")
        elif in_epoch and not in_batch and _stepped_by_all(program, scheduler):
            yield Hit(in_epoch[0], "prepared by Accelerate, which steps it once for each process")
        elif in_epoch and not in_batch and _counts_batches(program, scheduler):
            yield Hit(in_epoch[0], "after each epoch, made for batches")
        elif in_batch and not in_epoch and _same_count(program, scheduler, in_batch[0]):
            yield Hit(in_batch[0], "after each batch, made for epochs")


_LENGTHS = ("T_max", "total_iters", "total_steps", "num_training_steps")


def _length(program: Program, scheduler: ast.Call) -> ast.expr | None:
    """The number of steps that a schedule is made for."""
    places = {"CosineAnnealingLR": 1, "PolynomialLR": 1, "OneCycleLR": 2}
    place = places.get(last_name(scheduler.func), -1)
    return next((found for name in _LENGTHS if (found := given(program, scheduler, name, place)) is not None), None)


def _counts_batches(program: Program, scheduler: ast.Call) -> bool:
    """T_max=epochs * len(loader)."""
    count = _length(program, scheduler)
    return count is not None and depends(program, count, _loader_length(program))


def _loader_length(program: Program) -> Callable[[ast.AST], bool]:
    def wanted(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Call) and last_name(node.func) == "len" and node.args):
            return False
        made = [each for each in origins(program, node.args[0]) if isinstance(each, ast.Call)]
        return bool(made) and all(last_name(each.func) in LOADERS for each in made)

    return wanted


def _same_count(program: Program, scheduler: ast.Call, step: ast.Call) -> bool:
    """total_iters=100, stepped in each batch of range(100) epochs."""
    count = constant(program, _length(program, scheduler))
    if not isinstance(count, int) or last_name(scheduler.func) not in ("CosineAnnealingLR", "PolynomialLR", "LinearLR"):
        return False
    if last_name(scheduler.func) == "LinearLR" and given(program, scheduler, "end_factor", 2) is None:
        return False  # a warm-up, as it is by default
    for path in loops(program, step):
        for loop in path:
            match loop:
                case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[*_, last])):
                    if constant(program, last) == count:
                        return True
    return False


def _stepped_by_all(program: Program, scheduler: ast.Call) -> bool:
    """A schedule of epochs that Accelerate prepares: it is stepped as many times as there are processes."""
    is_prepared = any(
        scheduler in origins(program, each) for call in program.named.get("prepare", []) for each in call.args
    )
    told = ("split_batches", "step_scheduler_with_optimizer")
    if not is_prepared or any(each.arg in told for call in program.calls for each in call.keywords):
        return False
    parts = [*scheduler.args[1:], *(each.value for each in scheduler.keywords)]
    return library(program, "accelerate") and not any(on_world(program, part) for part in parts)


def _runs_over_ranks(loop: ast.For) -> bool:
    match loop.iter:
        case ast.Call(func=ast.Name(id="range"), args=[count]):
            return is_n(count)
    return False


def _counts_epochs(program: Program, scheduler: ast.Call) -> bool:
    """CosineAnnealingLR(T_max=epochs): by a name of epochs, in which no number of batches enters."""
    if last_name(scheduler.func) != "CosineAnnealingLR":
        return False
    count = given(program, scheduler, "T_max", 1)
    if count is None or depends(
        program, count, lambda node: isinstance(node, ast.Call) and last_name(node.func) == "len"
    ):
        return False
    if depends(program, count, lambda node: bool(re.search(r"steps|iters|batches", last_name(node).lower()))):
        return False
    return bool(re.search(r"epochs?$", last_name(count).lower()))


def _already_shared(program: Program, scheduler: ast.Call) -> bool:
    """A schedule of len(loader) steps of a loader that was prepared before, which is then prepared itself."""
    is_prepared = [
        call
        for call in program.named.get("prepare", [])
        if any(scheduler in origins(program, each) for each in call.args)
    ]
    if (
        not is_prepared
        or not library(program, "accelerate")
        or any(
            each.arg in ("split_batches", "step_scheduler_with_optimizer")
            for call in program.calls
            for each in call.keywords
        )
    ):
        return False
    before = [call for call in program.named["prepare"] if call.lineno < scheduler.lineno and call not in is_prepared]

    def counted(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Call) and last_name(node.func) == "len" and node.args):
            return False
        return any(
            set(origins(program, node.args[0])) & set(origins(program, each)) for call in before for each in call.args
        )

    parts = [*scheduler.args[1:], *(each.value for each in scheduler.keywords)]
    return (
        bool(before)
        and any(depends(program, part, counted) for part in parts)
        and not any(on_world(program, part) for part in parts)
    )
