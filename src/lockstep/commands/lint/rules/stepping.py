"""Where a learning rate schedule is stepped: after each batch, after each epoch, always or under a condition."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside, loops, step_loops, ways
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.rules.by_ignite import event_of
from lockstep.commands.lint.rules.groups import is_update
from lockstep.commands.lint.rules.intervals import stepped_by_hand
from lockstep.commands.lint.rules.units import unit
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import text_of


@dataclass(frozen=True, eq=False)
class Step:
    """A call of step() on one way of calls to it. `kind`: batch, epoch or other.

    `sometimes`: under a condition; `told`: it is given the place, so that the calls are not counted.
    """

    call: ast.Call
    kind: str
    loops: tuple[Loop, ...]
    sometimes: bool
    told: bool


@remembered
def steps(program: Program, scheduler: ast.Call, name: str = "step") -> list[Step]:
    """The calls that step a schedule, on each way of calls that leads there."""
    return list(_steps(program, scheduler, name))


def _steps(program: Program, scheduler: ast.Call, name: str) -> Iterator[Step]:
    for call in program.named.get(name, []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        made, hook = stepped_by_hand(program, call)
        made = made or (_made(program, owner) if owner is not None else [])
        if scheduler not in made:
            continue
        told = bool(call.args or call.keywords) and last_name(scheduler.func) != "ReduceLROnPlateau"
        several = len({each for each in made if isinstance(each, ast.Call)}) > 1
        event = hook or event_of(program, call)
        if event:
            yield Step(call, event, (), False, told)
        for path, tests in ways(program, call):
            unknown = any(not _always(test) and not _updates(program, test) for test in tests)
            kind = _kind(program, path)
            if unknown and (several or kind == "other"):
                kind = "other"
            yield Step(call, kind, tuple(path), unknown, told)


def _made(program: Program, owner: ast.expr) -> list[ast.AST]:
    """What an object comes from; of an element of a list that is written out, what the list holds."""
    found = []
    for made in origins(program, owner):
        listed = origins(program, made.iter) if isinstance(made, ast.For) else []
        parts = [part for each in listed if isinstance(each, ast.List | ast.Tuple) for part in each.elts]
        found += [one for part in parts for one in origins(program, part)] or [made]
    return found


def _kind(program: Program, path: list[Loop]) -> str:
    if any(loop in batch_loops(program) for loop in path):
        return "batch"
    return "epoch" if any(loop in epoch_loops(program) for loop in path) else "other"


@remembered
def batch_loops(program: Program) -> frozenset[Loop]:
    """The loops of training whose passes hold a backward, or an update."""
    found = set(step_loops(program))
    for call in program.named.get("step", []):
        if is_update(call):
            found |= {path[0] for path in loops(program, call) if path}
    return frozenset(found)


@remembered
def epoch_loops(program: Program) -> frozenset[Loop]:
    """The loops around those over batches."""
    around = {loop for outer in step_loops(program).values() for loop in outer}
    return frozenset(around - batch_loops(program))


def counts_batches(program: Program, step: Step) -> bool:
    """Whether a step in each batch is told a number of batches: epoch * len(loader) + i, or one that is counted up."""
    told = [*step.call.args, *(each.value for each in step.call.keywords)][:1] if step.kind == "batch" else []
    return any(unit(program, each).of_batches or _counted_up(program, each, step.loops) for each in told)


def _counted_up(program: Program, number: ast.expr, around: tuple[Loop, ...]) -> bool:
    """Whether each pass of the loop over batches adds one to a number that no loop sets back."""
    source = program.owner[number]
    found = bindings(program, number, number.id) if isinstance(number, ast.Name) else []
    found = found or source.attributes.get(text_of(number), [])
    batches = [loop for loop in around if loop in batch_loops(program)]
    added = [each for each in found if each.kind == "aug"]
    begun = [each for each in found if each.kind == "value"]
    return (
        len(added) == 1
        and bool(begun)
        and len(added) + len(begun) == len(found)
        and isinstance(added[0].value, ast.Constant)
        and any(loop in batches for path in loops(program, added[0].node) for loop in path)
        and not any(path for each in begun for path in loops(program, each.node))
    )


def _updates(program: Program, test: ast.expr) -> bool:
    """Whether the weights are updated under the same condition: `if phase == "train":`."""
    home = program.owner.get(test)
    outer = home.parents[test] if home is not None else None
    return isinstance(outer, ast.If) and any(is_update(each) for part in outer.body for each in inside(program, part))


def _always(test: ast.expr) -> bool:
    """A condition that holds in each update: that there is a scheduler, or that this pass makes the update."""
    text = text_of(test).lower()
    if re.fullmatch(r"(self\.)?\w*sched\w*( is not none)?|\w*warm\w* is not none", text):
        return True
    accumulates = "sync_gradients" in text or ("accum" in text and "epoch" not in text)
    return bool(accumulates or re.search(r"scale\w* (<=|>=|==|<|>)|skip", text)) and "len(" not in text
