"""Rules about learning rate schedules: how often they are stepped."""

import ast
from collections.abc import Iterable, Iterator

from lockstep.commands.lint.around import above
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.guards import guard
from lockstep.commands.lint.learning import is_n
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_accelerate import steps_of_all
from lockstep.commands.lint.rules.by_timm import told_another_time
from lockstep.commands.lint.rules.intervals import wrong_interval
from lockstep.commands.lint.rules.lengths import Lengths, lengths, schedulers
from lockstep.commands.lint.rules.sharing import of_all_by_own_batch
from lockstep.commands.lint.rules.stepping import Step, counts_batches, epoch_loops, steps
from lockstep.commands.lint.rules.units import last_of
from lockstep.commands.lint.rules.windows import accumulations
from lockstep.commands.lint.several import distributed, library
from lockstep.commands.lint.source import Loop


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
    """step() per batch and per epoch; per batch with a count of epochs, and the other way; once a process."""
    yield from wrong_interval(program)
    yield from told_another_time(program)
    for scheduler in schedulers(program):
        hit = _judged(program, scheduler)
        if hit is not None:
            yield hit


def _judged(program: Program, scheduler: ast.Call) -> Hit | None:
    found, every = lengths(program, scheduler), steps(program, scheduler)
    counts = not (found.converted or found.of_function)
    for step in every if counts and any(each.of_epochs for each in found.units) else ():
        if step.told and counts_batches(program, step):
            return Hit(step.call, "told the batch, made for epochs")
    known = [each for each in every if not each.told]
    for step in known:
        if step.loops and isinstance(step.loops[0], ast.For) and _runs_over_ranks(step.loops[0]):
            return Hit(step.call, "once for each process")
        if distributed(program) and step.kind != "other" and _on_some_ranks(program, step):
            return Hit(step.call, "on a part of the ranks")
    in_batch = [each for each in known if each.kind == "batch"]
    in_epoch = [each for each in known if each.kind == "epoch"]
    if twice := _twice(in_batch, in_epoch):
        return twice
    shared = steps_of_all(program, scheduler, found, bool(in_batch), [each.call for each in in_epoch])
    if shared is not None:
        return shared
    if in_epoch and not in_batch and _made_for_batches(program, scheduler, found):
        return Hit(in_epoch[0].call, "after each epoch, made for batches")
    if in_batch and not in_epoch and (reason := _too_long(program, found, in_batch)):
        return Hit(scheduler, reason)
    plain = [each for each in in_batch if not each.sometimes]
    if plain and not in_epoch and _made_for_epochs(program, scheduler, found, plain[0]):
        return Hit(plain[0].call, "after each batch, made for epochs")
    return None


def _too_long(program: Program, found: Lengths, known: list[Step]) -> str:
    """A whole training's batches times the processes; its batches, where only each k-th makes an update and a step."""
    if library(program, "accelerate") or found.converted:
        return ""
    plain = [each for each in found.units if not each.samples and not each.vague]
    whole = [each for each in plain if each.epochs == 1 and each.batches == 1]
    shared = whole and any(of_all_by_own_batch(program, size) for size in found.sizes)
    if shared or any(each.world == 1 for each in whole):
        return "made for all processes' batches, stepped for one process's"
    if not whole or any(depends(program, size, _divides) for size in found.sizes):
        return ""
    for each in accumulations(program):
        gated = set(above(program.owner[known[0].call], known[0].call)) | {known[0].call}
        number = constant(program, each.every)
        if number is ... and isinstance(each.every, ast.Name | ast.Attribute):
            number = constant(program, option(program, last_name(each.every))[1])
        if each.when in gated and len(known) == 1 and isinstance(number, int) and number > 1:
            return f"made for batches, stepped for each {number} of them"
    return ""


def _divides(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv)


def _twice(in_batch: list[Step], in_epoch: list[Step]) -> Hit | None:
    """Stepped by two calls, each of which always comes."""
    batch = [each for each in in_batch if not each.sometimes]
    epoch = [each for each in in_epoch if not each.sometimes]
    if batch and epoch and not {each.call for each in batch} & {each.call for each in epoch}:
        return Hit(epoch[0].call, "after each batch and after each epoch")
    return None


def _on_some_ranks(program: Program, step: Step) -> bool:
    """Whether a condition within the loop lets a part of the ranks step."""
    found = guard(program, step.call)
    return found is not None and bool(set(step.loops) & set(above(program.owner[found], found)))


def _runs_over_ranks(loop: ast.For) -> bool:
    match loop.iter:
        case ast.Call(func=ast.Name(id="range"), args=[count]):
            return is_n(count)
    return False


def _made_for_batches(program: Program, scheduler: ast.Call, found: Lengths) -> bool:
    """T_max=epochs * len(loader); a number of steps that is written out, and of more than the epochs."""
    if found.converted:
        return False
    if any(each.of_batches for each in found.units):
        return True
    if last_name(scheduler.func) == "CyclicLR":
        return given(program, scheduler, "step_size_up", 3) is None  # 2,000 by default
    numbers = [each for each in found.numbers if isinstance(each, int)]
    counts = _epochs(program, epoch_loops(program))
    if last_name(scheduler.func) != "OneCycleLR" or len(numbers) != 1 or len(counts) != 1:
        return False
    return numbers[0] >= 10 * max(counts)


def _made_for_epochs(program: Program, scheduler: ast.Call, found: Lengths, step: Step) -> bool:
    """T_max=epochs, in which no number of batches enters; or a number that is the epochs' own."""
    name = last_name(scheduler.func)
    if found.converted or (found.of_function and any(each.of_batches or each.vague for each in found.units)):
        return False
    if any(each.of_epochs or (each.batches == -1 and not each.samples and not each.epochs) for each in found.units):
        return True  # epochs, or steps / len(loader)
    if not epoch_loops(program) & set(step.loops):
        return False
    numbers = [each for each in found.numbers if isinstance(each, int)]
    if name == "ReduceLROnPlateau":
        patience = constant(program, given(program, scheduler, "patience", 3) or ast.Constant(10))
        return isinstance(patience, int) and patience <= 10
    gamma = given(program, scheduler, "gamma", 1 if name == "ExponentialLR" else 2) or ast.Constant(0.1)
    factor = constant(program, gamma)
    if name == "ExponentialLR":
        return isinstance(factor, float) and 0 < factor <= 0.97
    most = max(_epochs(program, step.loops), default=0)
    if name in ("StepLR", "MultiStepLR"):
        falls = isinstance(factor, float) and 0 < factor <= 0.5
        return falls and bool(numbers) and max(numbers) <= most and most >= 3
    ends = name != "LinearLR" or given(program, scheduler, "end_factor", 2) is not None  # else a warm-up
    return ends and most in numbers and name in ("CosineAnnealingLR", "PolynomialLR", "OneCycleLR", "LinearLR")


def _epochs(program: Program, around: Iterable[Loop]) -> set[int]:
    """The numbers that loops over epochs count to: as they are written out, or an option's default."""
    found = set()
    for loop in epoch_loops(program) & set(around):
        last = last_of(loop)
        number = constant(program, last)
        if number is ... and isinstance(last, ast.Name | ast.Attribute):
            number = constant(program, option(program, last_name(last))[1])
        if isinstance(number, int):
            found.add(number)
    return found
