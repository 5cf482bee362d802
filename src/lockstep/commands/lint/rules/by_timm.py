"""timm's schedules, which are told the time: one made for epochs by step(epoch), one for updates by step_update(n)."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant, given, spread
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.stepping import Step, counts_batches, steps
from lockstep.commands.lint.rules.units import unit
from lockstep.commands.lint.several import library

_LENGTHS = {
    **dict.fromkeys(("CosineLRScheduler", "TanhLRScheduler", "PolyLRScheduler"), "t_initial"),
    **dict.fromkeys(("StepLRScheduler", "MultiStepLRScheduler"), "decay_t"),
}


def told_another_time(program: Program) -> Iterator[Hit]:
    """A schedule of epochs that is told updates, or the other way round; or by the call that it doesn't listen to."""
    for name, length in _LENGTHS.items() if library(program, "timm") else ():
        for call in program.named.get(name, []):
            size = given(program, call, length, 1)
            if qualified(program, call.func).startswith("timm.scheduler.") and size is not None:
                hit = _judged(program, call, size)
                if hit is not None:
                    yield hit


def _judged(program: Program, scheduler: ast.Call, size: ast.expr) -> Hit | None:
    said = given(program, scheduler, "t_in_epochs")
    in_epochs = constant(program, said) if said is not None else ... if spread(scheduler) else True
    if not isinstance(in_epochs, bool):
        return None
    names = ("step", "step_update") if in_epochs else ("step_update", "step")
    heard, unheard = (steps(program, scheduler, name) for name in names)
    if not heard:
        alone = unheard and not any(_may_be(program, call) for call in program.named.get(names[0], []))
        unit_of = "epochs" if in_epochs else "updates"
        return Hit(unheard[0].call, f"made for {unit_of}, which {names[0]}() tells") if alone else None
    found = unit(program, size)
    if in_epochs and found.of_batches and all(_tells_epochs(program, each) for each in heard):
        return Hit(heard[0].call, "told the epoch, made for batches")
    batches = [each for each in heard if counts_batches(program, each)]
    return Hit(batches[0].call, "told the batch, made for epochs") if batches and found.of_epochs else None


def _may_be(program: Program, call: ast.Call) -> bool:
    """Whether a call may be a schedule's: of what nobody knows, or by its name."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    known = any(isinstance(each, ast.Call) for each in origins(program, owner))
    return not known or bool(re.search("sched", last_name(owner).lower()))


def _tells_epochs(program: Program, step: Step) -> bool:
    return bool(step.call.args) and unit(program, step.call.args[0]).of_epochs
