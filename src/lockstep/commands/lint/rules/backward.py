"""Rules about a backward pass: clipping, and when gradients are reduced."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.places import backwards
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed
from lockstep.commands.lint.rules.groups import groups
from lockstep.commands.lint.rules.windows import accumulations
from lockstep.commands.lint.source import Loop, above


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


@rule(
    "LS312",
    "no-sync-without-forward",
    "no_sync leaves out the forward pass",
    result="gradients are reduced in each pass nevertheless: no time is saved",
    why="DDP decides in forward whether the backward pass will reduce",
    mend="with model.no_sync():\n    loss = loss_fn(model(x), y)\n    loss.backward()",
)
def no_sync_without_forward(program: Program) -> Iterator[Hit]:
    """`with no_sync()` around a backward whose loss was computed outside; DDP's flag set after the forward."""
    yield from _flag_after_forward(program)
    for call in [*program.named.get("no_sync", []), *program.named.get("no_backward_sync", [])]:
        source = program.owner[call]
        outer = next((each for each in above(source, call) if isinstance(each, ast.With)), None)
        if outer is None or not any(call in ast.walk(item.context_expr) for item in outer.items):
            continue
        runs = [each for each in backwards(program) if any(each in ast.walk(part) for part in outer.body)]
        for run in runs:
            names = {each.id for each in ast.walk(run) if isinstance(each, ast.Name)} - {
                "scaler",
                "accelerator",
                "fabric",
            }
            inner = {
                last_name(each)
                for part in outer.body
                for each in ast.walk(part)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
            direct = any(
                isinstance(each, ast.Call) and each is not run
                for each in ast.walk(run.func)
                if isinstance(each, ast.Call) and last_name(each.func) != "scale"
            )
            bound = [b for n in names for b in source.names.get(source.scopes[run], {}).get(n, []) if b.kind == "value"]
            if (
                names
                and bound
                and not names & inner
                and not direct
                and definition(program, run.func) is None
                and not _forward_inside(run)
            ):
                yield Hit(call)


def _flag_after_forward(program: Program) -> Iterator[Hit]:
    """require_backward_grad_sync set between a forward and its backward, where the forward has already read it."""
    for source in program.sources:
        for text, bindings in source.attributes.items():
            for binding in bindings if text.endswith(".require_backward_grad_sync") else []:
                name, place = text.rpartition(".")[0], binding.node
                loop = next((each for each in above(source, place) if isinstance(each, Loop)), None)
                nodes = [each for each in ast.walk(loop) if isinstance(each, ast.Call)] if loop is not None else []
                forwards = [each.lineno for each in nodes if ast.unparse(each.func) == name]
                ends = [each.lineno for each in nodes if each in backwards(program)]
                line = getattr(place, "lineno", 0)
                if forwards and ends and max(forwards) < line < min(ends):
                    yield Hit(place)


def _forward_inside(run: ast.Call) -> bool:
    return any(
        isinstance(each, ast.Call) and last_name(each.func) not in ("scale", "backward")
        for part in run.args
        for each in ast.walk(part)
    )
