"""Rules about a reduction and what is done with its result."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.flow import is_reduction, own_nodes
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.places import over_loader
from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.readings import is_a_wait, sums_dropped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.metrics import shared_loops
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import text_of, walk


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
            and not is_a_wait(call)
            and (returns_it or _of_a_copy(program, call) or _never_read(program, call))
        ) or (returns_it and isinstance(parent, ast.Assign) and _result_unread(program, call, parent.targets[0])):
            yield Hit(call)
    for loop, _ in shared_loops(program):
        yield from (Hit(call) for call in sums_dropped(program, loop))


def _result_unread(program: Program, call: ast.Call, target: ast.expr) -> bool:
    """Whether nothing reads the names that a reduction's result is given, which are others than its arguments'."""
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    names = {each.id for each in parts if isinstance(each, ast.Name)}
    if len(names) < len(parts) or not any(name.strip("_") for name in names):
        return False
    if function_of(program.owner[call], call) is None:
        return False
    read = {
        each.id for each in own_nodes(program, call) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
    }
    same = {each.id for argument in call.args for each in walk(argument) if isinstance(each, ast.Name)}
    return not names & (read | same)


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
    return not any(isinstance(each, ast.Name) and each.id not in ("torch", "device") for each in walk(call))


def _returns_reduced(program: Program, call: ast.Call) -> bool:
    """accelerator.gather(x), hvd.allreduce(x), or a local function that reduces a copy and returns it."""
    owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    name = last_name(call.func)
    if name in ("reduce", "gather", "gather_for_metrics") and (
        "accelerator" in owner or _of(program, call, "Accelerator")
    ):
        return True
    if re.match(r"torch\.distributed\.(nn|_functional_collectives)\b.*\.all_\w+$", qualified(program, call.func)):
        return True
    if name in ("all_reduce", "all_gather") and _of(program, call, "Fabric"):
        return True
    if qualified(program, call.func).startswith("timm.utils.") and name == "reduce_tensor":
        return True
    if (name == "allreduce" and (owner == "hvd" or qualified(program, call.func).startswith("horovod."))) or (
        name in ("all_reduce", "all_gather") and owner.endswith(("fabric", "idist"))
    ):
        return True
    function = callee(program, call)
    return function is not None and _reduces_a_copy(program, function)


def _of(program: Program, call: ast.Call, kind: str) -> bool:
    """Whether a call is a method's of what this class of a framework made."""
    return isinstance(call.func, ast.Attribute) and bool(made_by(program, call.func.value, kind))


def _writes_back(node: ast.AST) -> bool:
    """x[key] = value, x.copy_(value): what was given is changed as well."""
    if isinstance(node, ast.Call) and last_name(node.func) in ("copy_", "update", "fill_"):
        return True
    return isinstance(node, ast.Assign) and any(isinstance(each, ast.Subscript) for each in node.targets)


@remembered
def _reduces_a_copy(program: Program, function: Function) -> bool:
    """Whether a function is about a reduction of a copy, and returns it."""
    nodes = list(walk(function))
    if not any(is_reduction(each) for each in nodes):
        return False
    if any(_writes_back(each) for each in nodes) or any(
        isinstance(each, Loop) and over_loader(program, each) for each in nodes
    ):
        return False
    copies = ("clone", "tensor", "as_tensor", "stack")
    copied = any(isinstance(each, ast.Call) and last_name(each.func) in copies for each in nodes)
    returned = any(isinstance(each, ast.Return) and each.value is not None for each in nodes)
    return copied and returned and _one_value(function)


def _one_value(function: Function) -> bool:
    """Whether a function is about a reduction alone: a few statements, no loop over batches."""
    return len(function.body) <= 10 and not any(
        isinstance(each, Loop) and len(each.body) > 6 for each in walk(function)
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
    return isinstance(first, ast.Call) and last_name(first.func) in ("clone", "tensor", "as_tensor", "stack", "cat")
