"""What a learning rate schedule is made for: the lengths that it is given, and what they count."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rules.units import Unit, unit
from lockstep.commands.lint.source import Function, parameters
from lockstep.commands.lint.tree import walk

_PLACES: dict[str, tuple[tuple[str, int], ...]] = {
    "CosineAnnealingLR": (("T_max", 1),),
    "CosineAnnealingWarmRestarts": (("T_0", 1),),
    "PolynomialLR": (("total_iters", 1),),
    "LinearLR": (("total_iters", 3),),
    "ConstantLR": (("total_iters", 2),),
    "StepLR": (("step_size", 1),),
    "MultiStepLR": (("milestones", 1),),
    "SequentialLR": (("milestones", 2),),
    "CyclicLR": (("step_size_up", 3),),
}
_OF_STEPS = (("num_warmup_steps", 1), ("num_training_steps", 2))


@dataclass(frozen=True)
class Lengths:
    """`sizes`: the expressions, `units` what they count, `numbers` their values where they are written out.

    `of_function`: they stand in a function of the step, which may convert it (`converted`: it does).
    """

    sizes: tuple[ast.expr, ...]
    units: tuple[Unit, ...]
    numbers: tuple[object, ...]
    of_function: bool = False
    converted: bool = False


@remembered
def schedulers(program: Program) -> list[ast.Call]:
    """The calls that make a schedule: torch's, transformers', and of local classes that go by torch's."""
    return [
        call
        for call in program.calls
        if ".lr_scheduler." in qualified(program, call.func)
        or (re.match(r"get_\w*schedule\w*$|get_scheduler$", last_name(call.func)) and callee(program, call) is None)
        or _is_local(program, call)
    ]


def _is_local(program: Program, call: ast.Call) -> bool:
    owner = definition(program, call.func)
    return isinstance(owner, ast.ClassDef) and any(
        last_name(base) in ("LRScheduler", "_LRScheduler") for base in owner.bases
    )


@remembered
def lengths(program: Program, scheduler: ast.Call) -> Lengths:
    """The lengths of a schedule, and of those that it is put together from."""
    found = [_own(program, each) for each in _parts(program, scheduler)]
    sizes = tuple(size for each in found for size in each.sizes)
    return Lengths(
        sizes,
        tuple(one for each in found for one in each.units),
        tuple(one for each in found for one in each.numbers),
        any(each.of_function for each in found),
        any(each.converted for each in found),
    )


def _parts(program: Program, scheduler: ast.Call, depth: int = 0) -> Iterator[ast.Call]:
    yield scheduler
    place = {"SequentialLR": 1, "ChainedScheduler": 0}.get(last_name(scheduler.func))
    listed = given(program, scheduler, "schedulers", place) if place is not None else None
    for made in origins(program, listed) if listed is not None and depth < 3 else []:
        for part in made.elts if isinstance(made, ast.List | ast.Tuple) else []:
            for each in origins(program, part):
                if isinstance(each, ast.Call):
                    yield from _parts(program, each, depth + 1)


def _own(program: Program, scheduler: ast.Call) -> Lengths:
    name = last_name(scheduler.func)
    if name in ("LambdaLR", "MultiplicativeLR"):
        return _of_function(program, given(program, scheduler, "lr_lambda", 1))
    if name == "OneCycleLR":
        return _one_cycle(program, scheduler)
    if _is_local(program, scheduler):
        totals = [*scheduler.args[1:], *(each.value for each in scheduler.keywords if each.arg != "optimizer")]
        return _listed(program, [each for each in totals if _whole(unit(program, each))])
    places = _PLACES.get(name, _OF_STEPS if name.startswith("get_") else ())
    if name in ("get_scheduler",):
        places = tuple((word, place + 1) for word, place in _OF_STEPS)
    sizes = [size for word, place in places if (size := given(program, scheduler, word, place)) is not None]
    return _listed(program, sizes)


def _whole(found: Unit) -> bool:
    """Epochs times batches: a whole training's length, whatever a class of the script's own makes of it."""
    return found.epochs >= 1 and found.batches >= 1


def _listed(program: Program, sizes: list[ast.expr]) -> Lengths:
    numbers: list[object] = []
    for size in sizes:
        for made in origins(program, size):
            parts = made.elts if isinstance(made, ast.List | ast.Tuple) else [made]
            numbers += [constant(program, part) for part in parts if isinstance(part, ast.expr)]
    return Lengths(tuple(sizes), tuple(unit(program, each) for each in sizes), tuple(numbers))


def _one_cycle(program: Program, scheduler: ast.Call) -> Lengths:
    total = given(program, scheduler, "total_steps", 2)
    if total is not None and constant(program, total) is not None:
        return _listed(program, [total])
    epochs, each = given(program, scheduler, "epochs", 3), given(program, scheduler, "steps_per_epoch", 4)
    if epochs is None or each is None:
        return Lengths((), (), ())
    count = constant(program, each)
    if count == 1:
        return _listed(program, [epochs])
    found = unit(program, each)
    made = Unit(epochs=1).times(found if found.of_batches or found.vague else Unit(batches=1))
    return Lengths((epochs, each), (made,), ())


def _of_function(program: Program, value: ast.expr | None) -> Lengths:
    """The lengths in a LambdaLR's function: what its step is compared with, and divided by."""
    sizes: list[ast.expr] = []
    converted = False
    for made in origins(program, value) if value is not None else []:
        called = _callable(program, made)
        if called is None:
            return Lengths((), (), (), of_function=True, converted=True)
        made, step = called
        names = {step}
        for node in walk(made):
            match node:
                case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv() | ast.Mod(), right=right):
                    sizes.append(right)
                    converted = converted or (
                        _is(left, names) and unit(program, right).epochs == 0 and _counts(program, right)
                    )
                case ast.BinOp(left=left, op=ast.Mult(), right=right):
                    other = right if _is(left, names) else left if _is(right, names) else None
                    converted = converted or (other is not None and _counts(program, other))
                case ast.Compare(left=left, comparators=comparators):
                    sizes += [each for each in (left, *comparators) if not _mentions(each, names)]
    found = _listed(program, [each for each in sizes if not isinstance(each, ast.Constant)])
    plain = tuple(each for each in found.units if each != Unit(vague=True))
    return Lengths(found.sizes, plain, found.numbers, of_function=True, converted=converted)


def _callable(program: Program, made: ast.AST) -> tuple[Function | ast.Lambda, str] | None:
    """What is called with the step: a function, a lambda, a local object's __call__; and the step's name there."""
    owner = definition(program, made.func) if isinstance(made, ast.Call) else None
    found = method(program, owner, "__call__") if isinstance(owner, ast.ClassDef) else made
    if not isinstance(found, Function | ast.Lambda):
        return None
    names = [each.arg for each in parameters(found)][int(found is not made) :]
    return (found, names[0]) if names else None


def _counts(program: Program, node: ast.expr) -> bool:
    return unit(program, node).of_batches


def _is(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _mentions(node: ast.expr, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in walk(node))
