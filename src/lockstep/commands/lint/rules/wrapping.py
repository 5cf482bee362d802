"""Rules about devices and the wrapped model: what DDP was given, and what is called."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import guarded
from lockstep.commands.lint.roles import wrapped, wraps
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import unwrapped_calls
from lockstep.commands.lint.source import above


@rule(
    "LS301",
    "wrapped-before-moved",
    "the model is moved after it was wrapped",
    result="DDP has made its buckets for the CPU's parameters: it raises, or reduces over the CPU, many times slower",
    why=".to(device) gives parameters another place after DDP has taken note of them",
    mend="model = Net().to(device)\nmodel = DistributedDataParallel(model, device_ids=[local_rank])",
)
def wrapped_before_moved(program: Program) -> Iterator[Hit]:
    """.cuda() or .to(device) of what DistributedDataParallel returned."""
    for name in ("cuda", "to"):
        for call in program.named.get(name, []):
            if (
                isinstance(call.func, ast.Attribute)
                and wraps(program, call.func.value)
                and _is_move(call)
                and not _moved_before(program, call)
            ):
                yield Hit(call)


def _is_move(call: ast.Call) -> bool:
    return last_name(call.func) == "cuda" or (
        bool(call.args) and "dtype" not in ast.unparse(call) and "float" not in ast.unparse(call)
    )


def _moved_before(program: Program, call: ast.Call) -> bool:
    """Whether the model was on its device when it was wrapped: then the second move does nothing."""
    assert isinstance(call.func, ast.Attribute)
    for made in wraps(program, call.func.value):
        inner = made.args[0] if made.args else None
        while (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and last_name(inner.func) not in ("to", "cuda")
        ):
            inner = inner.func.value
        if isinstance(inner, ast.Call) and last_name(inner.func) in ("to", "cuda"):
            return True
        source = program.owner[made]
        for other in [*program.named.get("to", []), *program.named.get("cuda", [])]:
            same = (
                isinstance(other.func, ast.Attribute)
                and inner is not None
                and ast.dump(other.func.value) == ast.dump(inner)
            )
            if same and program.owner[other] is source and other.lineno < made.lineno:
                return True
    return False


@rule(
    "LS302",
    "unwrapped-in-training",
    "the training step calls the model without its wrapper",
    result="gradients are never averaged: each rank trains a model of its own on 1/N of the data, and one of them is "
    "saved",
    why="DDP's hooks are set up in the wrapper's forward",
    mend="outputs = ddp_model(images)",
)
def unwrapped_in_training(program: Program) -> Iterator[Hit]:
    """In a step loop, a call of the model that DDP was given, or of .module, whose loss runs backward."""
    yield from unwrapped_calls(program)
    kept = {each for call in wrapped(program) if call.args for each in origins(program, call.args[0])}
    if not kept:
        return
    for call in program.named.get("create_supervised_trainer", []):
        model = call.args[0] if call.args else None
        if model is not None and not wraps(program, model) and set(origins(program, model)) & kept:
            yield Hit(call)
    for loop in step_loops(program):
        for node in inside(program, loop):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            direct = (
                isinstance(node.func, ast.Attribute) and node.func.attr == "module" and wraps(program, node.func.value)
            )
            made = (
                []
                if direct or qualified(program, node.func) or definition(program, node.func)
                else origins(program, node.func)
            )
            bare = (
                bool(made)
                and not wraps(program, node.func)
                and bool(set(made) & kept)
                and all(isinstance(each, ast.Call) for each in made)
                and isinstance(node.func, ast.Name)
            )
            if (
                (direct or bare)
                and not guarded(program, node)
                and _trains(program, node, loop)
                and not _reduced_by_hand(program)
            ):
                yield Hit(node)


def _trains(program: Program, node: ast.Call, loop: ast.AST) -> bool:
    """Whether a call's result enters a backward pass: no no_grad around, and the loop has no call of the wrapper."""
    for outer in above(program.owner[node], node):
        if isinstance(outer, ast.With) and any(
            re.search("no_grad|inference|eval", ast.unparse(item)) for item in outer.items
        ):
            return False
    return not any(
        isinstance(each, ast.Call) and each.args and wraps(program, each.func)
        for each in inside(program, loop)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name | ast.Attribute)
    )


def _reduced_by_hand(program: Program) -> bool:
    return any(".grad" in ast.unparse(call) for call in program.named.get("all_reduce", []))
