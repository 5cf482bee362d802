"""Lists of batches' means that a Lightning module keeps, and averages at the end of an epoch's evaluation."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of
from lockstep.commands.lint.calls import method
from lockstep.commands.lint.flow import is_reduction
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.parts import entries
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import constant, given, of_loader
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.batch_means import is_mean, mean_of_list
from lockstep.commands.lint.rules.by_lightning import known_size, logs, several, validated
from lockstep.commands.lint.source import Function, parameters
from lockstep.commands.lint.tree import walk

_ENDS = {
    "validation_step": ("on_validation_epoch_end", "validation_epoch_end"),
    "test_step": ("on_test_epoch_end", "test_epoch_end"),
}


def listed_means(program: Program) -> Iterator[Hit]:
    """self.log(name, torch.stack(self.losses).mean(), sync_dist=True), where each step appends its batch's mean."""
    loaders = [each for each, _ in validated(program)] if several(program) else []
    if not loaders or not all(_uneven(program, each) for each in loaders):
        return
    told = [(call, function) for call, function in logs(program) if _together(program, call)]
    for step_name, ends in _ENDS.items():
        for step in program.methods.get(step_name, []):
            owner = class_of(program.owner[step], step)
            for call, end in told if owner is not None else []:
                own = owner is not None and end.name in ends and method(program, owner, end.name) is end
                if own and _averages(program, step, end, call):
                    yield Hit(call, "of a list of batches' means")


def _together(program: Program, call: ast.Call) -> bool:
    """Whether what is logged is put together over the ranks."""
    if constant(program, given(program, call, "sync_dist")) is True:
        return True
    return any(map(is_reduction, _parts(program, call)))


def _parts(program: Program, call: ast.Call) -> list[ast.AST]:
    """The nodes of what is logged, and of what that was bound to."""
    value = given(program, call, "value", 1)
    return [part for each in [value, *origins(program, value)] for part in walk(each)] if value is not None else []


def _averages(program: Program, step: Function, end: Function, call: ast.Call) -> bool:
    """Whether an epoch's end averages the list that each step has appended its mean to, or its steps' results."""
    parts = _parts(program, call)
    for place in walk(step):
        match place:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(), attr="append"), args=[mean]):
                if is_mean(program, mean) and any(mean_of_list(part, place) for part in parts):
                    return True
    outputs = [each.arg for each in parameters(end)][1:]
    results = [each for each in returns(program, step) if each is not None]
    for part in parts:
        averaged = walk(part) if isinstance(part, ast.Call) and last_name(part.func) == "mean" else []
        for each in averaged:
            match each:
                case ast.ListComp(elt=taken, generators=[ast.comprehension(iter=ast.Name(id=name))]) if name in outputs:
                    if any(is_mean(program, one) for result in results for one in _taken(program, taken, result)):
                        return True
    return False


def _taken(program: Program, taken: ast.expr, result: ast.expr) -> list[ast.expr]:
    """What `each["loss"]`, or `each` itself, is of what a step returns."""
    if isinstance(taken, ast.Name):
        return [result]
    key = taken.slice.value if isinstance(taken, ast.Subscript) and isinstance(taken.slice, ast.Constant) else None
    found = [each for made in origins(program, result) if isinstance(key, str) for each in entries(program, made, key)]
    return [node for node, path in found if isinstance(node, ast.expr) and not path]


def _uneven(program: Program, loader: ast.Call) -> bool:
    """Whether a loader's last batch may be shorter: unless it is dropped, or the devices and batches divide the set."""
    size, batch = known_size(program, loader), constant(program, of_loader(program, loader, "batch_size"))
    even = size is not None and isinstance(batch, int) and batch > 0 and size % batch == 0
    return not even and constant(program, of_loader(program, loader, "drop_last")) is not True
