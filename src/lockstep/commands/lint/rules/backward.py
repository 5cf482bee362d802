"""Rules about a backward pass: clipping, and when gradients are reduced."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.program import Program, qualified
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed
from lockstep.commands.lint.rules.groups import groups
from lockstep.commands.lint.rules.windows import accumulations
from lockstep.commands.lint.several import wrapped
from lockstep.commands.lint.source import Function, Source
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS311",
    "no-no-sync",
    "gradients are all-reduced in each accumulated pass",
    result="k times the communication for the same gradients: on a slow link the training takes up to k times as long",
    why="DDP reduces in every backward() that is not under no_sync()",
    mend="with model.no_sync() if (i + 1) % accumulate else nullcontext():\n    loss = loss_fn(model(x), y) / "
    "accumulate\n"
    "    loss.backward()",
)
def no_no_sync(program: Program) -> Iterator[Hit]:
    """Accumulation with DDP in a program that never says no_sync."""
    several = wrapped(program) or managed(program)
    by_it = any(_of_accelerate(program, call) for call in program.named.get("accumulate", []))
    if not program.whole or not several or by_it or any(_spares(program, each) for each in program.sources):
        return
    for each in accumulations(program):
        yield Hit(each.backward, f"every {text_of(each.every)} passes")
    yield from (Hit(group.backward, "of each batch of a group") for group in groups(program))


def _of_accelerate(program: Program, call: ast.Call) -> bool:
    """accelerator.accumulate(model), which is neither COCO's accumulate() nor numpy.maximum.accumulate."""
    return isinstance(call.func, ast.Attribute) and bool(call.args) and not qualified(program, call.func)


_SPARING = {
    "no_sync",
    "require_backward_grad_sync",
    "no_backward_sync",
    "set_requires_gradient_sync",
    "block_backward_sync",
    "toggled_optimizer",
}


def _spares(program: Program, source: Source) -> bool:
    """Whether a file leaves out the reduction in a pass: by a name, or by a name in a text, as for getattr.

    What stands in a function that nothing ever names leaves out nothing.
    """
    said = any(name in source.text for name in _SPARING)
    for node in source.of(ast.Attribute, ast.Name, ast.Constant) if said else []:
        name = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", getattr(node, "id", ""))
        if isinstance(name, str) and name in _SPARING and not _idle(program, function_of(source, node)):
            return True
    return False


def _idle(program: Program, function: Function | None) -> bool:
    """Whether a helper, which is no method and runs no backward(), is named nowhere outside of itself."""
    if function is None or not isinstance(program.owner[function].parents[function], ast.Module):
        return False
    own = set(walk(function))
    trains = any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in own)
    return (
        not trains
        and not function.decorator_list
        and not any(
            function.name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "value", ""))
            or function.name in (getattr(node, "name", ""), getattr(node, "asname", ""))
            for source in program.sources
            if function.name in source.text
            for node in source.of(ast.Name, ast.Attribute, ast.Constant, ast.alias)
            if node not in own
        )
    )
