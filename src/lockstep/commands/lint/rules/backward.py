"""Rules about a backward pass: clipping, and when gradients are reduced."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.program import Program
from lockstep.commands.lint.roles import wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed
from lockstep.commands.lint.rules.groups import groups
from lockstep.commands.lint.rules.windows import accumulations


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
    by_it = any(isinstance(call.func, ast.Attribute) for call in program.named.get("accumulate", []))
    if (
        not program.whole
        or not several
        or by_it
        or any(_spares(node) for source in program.sources for node in source.nodes)
    ):
        return
    for each in accumulations(program):
        yield Hit(each.backward, f"every {ast.unparse(each.every)} passes")
    yield from (Hit(group.backward, "of each batch of a group") for group in groups(program))


_SPARING = {
    "no_sync",
    "require_backward_grad_sync",
    "no_backward_sync",
    "set_requires_gradient_sync",
    "block_backward_sync",
    "toggled_optimizer",
}


def _spares(node: ast.AST) -> bool:
    """What leaves out the reduction in a pass: by a name, or by a name in a text, as for getattr."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
            return name in _SPARING
    return False
