"""Schedules in Lightning: whether it steps them after each batch or each epoch, or a module does by hand."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import method
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.parts import members
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.lengths import lengths
from lockstep.commands.lint.several import lightning
from lockstep.commands.lint.tree import walk


def wrong_interval(program: Program) -> Iterator[Hit]:
    """configure_optimizers that gives Lightning a schedule of steps for each epoch, or one of epochs for each step."""
    for function in program.methods.get("configure_optimizers", []) if lightning(program) else []:
        if by_hand(program, function):
            continue
        for node in walk(function):
            value = node.value if isinstance(node, ast.Return) else None
            for scheduler, interval in _told(program, value):
                for made in origins(program, scheduler):
                    if not isinstance(made, ast.Call) or not _torchs(program, made):
                        continue
                    if interval == "epoch" and _of_steps(program, made):
                        yield Hit(node, "stepped each epoch, made for batches")
                    elif interval == "step" and _of_epochs(program, made):
                        yield Hit(node, "stepped each batch, made for epochs")


def by_hand(program: Program, node: ast.AST) -> bool:
    """Whether a place's class leaves the steps to itself: self.automatic_optimization = False."""
    owner = class_of(program.owner[node], node)
    said = members(program, owner, "automatic_optimization") if owner is not None else []
    return any(isinstance(each, ast.expr) and constant(program, each) is False for each, _ in said)


_HOOKS = {
    **dict.fromkeys(("training_step", "on_train_batch_start", "on_train_batch_end"), "batch"),
    **dict.fromkeys(("on_train_epoch_start", "on_train_epoch_end"), "epoch"),
}


def stepped_by_hand(program: Program, call: ast.Call) -> tuple[list[ast.AST], str]:
    """What `self.lr_schedulers().step()` steps, and whether its method runs for each batch or each epoch."""
    owner = class_of(program.owner[call], call) if lightning(program) else None
    here = function_of(program.owner[call], call)
    asked = made_by(program, call.func.value, "lr_schedulers") if isinstance(call.func, ast.Attribute) else []
    maker = method(program, owner, "configure_optimizers") if owner is not None else None
    kind = _HOOKS.get(here.name, "") if here is not None else ""
    if not asked or not kind or maker is None or not by_hand(program, call):
        return [], ""
    values = [each for each in returns(program, maker) if each is not None]
    found = [made for each in values for entry, _ in _told(program, each) for made in origins(program, entry)]
    return (found, kind) if len(found) == 1 else ([], "")


def _told(program: Program, value: ast.expr | None) -> Iterator[tuple[ast.expr, object]]:
    """The schedulers of what configure_optimizers returns, and when Lightning steps them: step, epoch or unknown."""
    for made in origins(program, value) if value is not None else []:
        match made:
            case ast.Tuple(elts=[_, schedulers]) | ast.List(elts=[_, schedulers]):
                listed = [each for each in origins(program, schedulers) if isinstance(each, ast.List | ast.Tuple)]
                for each in [part for one in listed for part in one.elts] or [schedulers]:
                    yield from _entry(program, each)
            case ast.Dict(keys=keys, values=values):
                for key, entry in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "lr_scheduler":
                        yield from _entry(program, entry)


def _entry(program: Program, entry: ast.expr) -> Iterator[tuple[ast.expr, object]]:
    """A scheduler by itself, or a dictionary that says how to step it."""
    for made in origins(program, entry):
        if isinstance(made, ast.Dict) and None not in made.keys:
            parts = {
                each.value: v for each, v in zip(made.keys, made.values, strict=True) if isinstance(each, ast.Constant)
            }
        elif isinstance(made, ast.Call) and last_name(made.func) == "dict" and not made.args:
            parts = {each.arg: each.value for each in made.keywords}
        else:
            yield entry, "epoch"
            continue
        if "scheduler" in parts and "monitor" not in parts:
            yield parts["scheduler"], constant(program, parts["interval"]) if "interval" in parts else "epoch"


def _torchs(program: Program, scheduler: ast.Call) -> bool:
    return qualified(program, scheduler.func).startswith("torch.optim.lr_scheduler.")


def _of_steps(program: Program, scheduler: ast.Call) -> bool:
    """OneCycleLR, or a schedule whose length is a number of batches."""
    found = lengths(program, scheduler)
    if found.converted:
        return False
    if last_name(scheduler.func) == "OneCycleLR":
        return not any(each.of_epochs for each in found.units)
    return any(each.of_batches for each in found.units)


def _of_epochs(program: Program, scheduler: ast.Call) -> bool:
    """A schedule whose length is a number of epochs, by its name or because the Trainer is told the same number."""
    found, name = lengths(program, scheduler), last_name(scheduler.func)
    if found.converted or (found.of_function and any(each.of_batches or each.vague for each in found.units)):
        return False
    if any(each.of_epochs for each in found.units) and not any(each.of_batches for each in found.units):
        return True
    counts = [constant(program, given(program, call, "max_epochs")) for call in program.named.get("Trainer", [])]
    known = [each for each in counts if isinstance(each, int) and each > 3]
    numbers = [each for each in found.numbers if isinstance(each, int)]
    if not known or not numbers or class_of(program.owner[scheduler], scheduler) is None:
        return False
    if name in ("StepLR", "MultiStepLR"):
        gamma = constant(program, given(program, scheduler, "gamma", 2) or ast.Constant(0.1))
        return isinstance(gamma, float) and gamma <= 0.5 and max(numbers) <= max(known)
    return name == "CosineAnnealingLR" and numbers == known
