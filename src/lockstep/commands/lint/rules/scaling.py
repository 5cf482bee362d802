"""The rule about gradients that a scaler multiplied, and clipping them: what runs in a pass, in its order."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import called
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.windows import passes
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import children, text_of, walk

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "dispatch_clip_grad", "clip_grad_norm", "clip_grads_with_norm_")
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_HALF = ("fp16", "16", "16-mixed", 16)


@dataclass(frozen=True, eq=False)
class _Event:
    """A call in a pass. `kind`: scale, unscale, clip or step; `under`: the conditions, and which way they went."""

    kind: str
    call: ast.Call
    under: tuple[tuple[str, bool], ...]


@rule(
    "LS207",
    "clip-before-unscale",
    "gradients are clipped before they are unscaled",
    result="gradients that are 65,536 times too large are cut to the limit: nearly each update has the same, tiny "
    "length",
    why="GradScaler multiplies the loss; the gradients stay multiplied until scaler.unscale_(optimizer)",
    mend="scaler.unscale_(optimizer)\ntorch.nn.utils.clip_grad_norm_(model.parameters(), "
    "limit)\nscaler.step(optimizer)",
)
def clip_before_unscale(program: Program) -> Iterator[Hit]:
    """clip_grad_norm_ between scaler.scale(loss).backward() and scaler.step, and no unscale_ before it."""
    told = set[ast.Call]()
    for call in [*_managed(program), *_in_hooks(program), *_in_apex(program), *_in_order(program)]:
        if call not in told:
            told.add(call)
            yield Hit(call)


def _in_order(program: Program) -> Iterator[ast.Call]:
    if not (program.named.get("scale") and program.named.get("step")):
        return
    functions = dict.fromkeys(each for call in program.named["scale"] for each in _homes(program, call))
    for place in [*passes(program), *functions]:
        events = list(_events(program, place, (), (place,)))
        for number, clip in enumerate(events):
            if clip.kind != "clip" or any(not way and _half(test) for test, way in clip.under):
                continue
            before = [each for each in events[:number] if _together(each, clip)]
            scaled = [n for n, each in enumerate(before) if each.kind == "scale"]
            later = [each for each in events[number:] if each.kind == "step" and _together(each, clip)]
            if scaled and later and not any(each.kind == "unscale" for each in before[scaled[-1] :]):
                yield clip.call


def _homes(program: Program, call: ast.Call) -> list[Function]:
    """The innermost and the outermost function that a call stands in."""
    found = [outer for outer in above(program.owner[call], call) if isinstance(outer, Function)]
    return [*found[:1], *found[1:][-1:]]


def _half(test: str) -> bool:
    return bool(re.search(r"scaler|amp|fp16|half|mixed|precision", test))


def _together(one: _Event, other: _Event) -> bool:
    """Whether two events can be in one pass: not in opposite branches of one condition."""
    ways = dict(one.under)
    return all(ways.get(test, way) == way for test, way in other.under)


def _events(
    program: Program, node: ast.AST, under: tuple[tuple[str, bool], ...], stack: tuple[ast.AST, ...]
) -> Iterator[_Event]:
    """What happens to gradients in a statement and the local functions that it calls, in order."""
    match node:
        case ast.If(test=test, body=body, orelse=orelse) | ast.IfExp(test=test, body=body, orelse=orelse):
            yield from _events(program, test, under, stack)
            name, way = _condition(test)
            yield from _block(program, body, (*under, (name, way)), stack)
            yield from _block(program, orelse, (*under, (name, not way)), stack)
        case ast.FunctionDef() | ast.AsyncFunctionDef() if node is not stack[-1]:
            return
        case ast.Lambda() | ast.ClassDef():
            return
        case ast.Call():
            for child in children(node):
                yield from _events(program, child, under, stack)
            kind = _kind(program, node)
            if kind:
                yield _Event(kind, node, under)
            for function in called(program, node) if not kind and len(stack) < 7 else ():
                if function not in stack:
                    yield from _events(program, function, under, (*stack, function))
        case _:
            for _, value in ast.iter_fields(node):
                if isinstance(value, list | ast.AST):
                    yield from _block(program, value, under, stack)


def _block(
    program: Program, body: object, under: tuple[tuple[str, bool], ...], stack: tuple[ast.AST, ...]
) -> Iterator[_Event]:
    for each in body if isinstance(body, list) else [body]:
        if not isinstance(each, ast.AST):
            continue
        yield from _events(program, each, under, stack)
        if isinstance(each, ast.If) and isinstance(each.body[-1], _LEAVES):
            name, way = _condition(each.test)
            under = (*under, (name, not way))


def _condition(test: ast.expr) -> tuple[str, bool]:
    """What a condition asks for, by the last part of its name, and which way it is asked."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            name, way = _condition(inner)
            return name, not way
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return _condition(left)
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            name, way = _condition(left)
            return name, not way
        case ast.Name() | ast.Attribute():
            return last_name(test).lower(), True
    return text_of(test).lower(), True


def _kind(program: Program, call: ast.Call) -> str:
    name = last_name(call.func)
    if name in ("unscale_", "unscale", "get_scale", "unscale_gradients", "unscale_grads", "unscale_gradients_"):
        return "unscale"
    if name in ("scale", "step") and _is_scaler(program, call):
        return name
    if name in _CLIPS or qualified(program, call.func).rpartition(".")[2] in _CLIPS:
        owner = text_of(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
        return "" if re.search(r"accelerator|fabric|engine", owner) else "clip"
    if name in ("mul_", "clamp_", "clip_") and isinstance(call.func, ast.Attribute):
        limits = name != "mul_" or re.search(r"min\(|clamp|clip|norm", " ".join(map(text_of, call.args)))
        return "clip" if limits and re.search(r"\.grad(\.data)?$", text_of(call.func.value)) else ""
    return ""


def _is_scaler(program: Program, call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner is not None and (
        "scaler" in text_of(owner).lower()
        or depends(
            program, owner, lambda node: isinstance(node, ast.Call) and last_name(node.func).endswith("GradScaler")
        )
    )


def _managed(program: Program) -> Iterator[ast.Call]:
    """torch's clipping beside Accelerate's or Fabric's scaler, whose own clipping would have unscaled."""
    told = [("Accelerator", "mixed_precision"), ("Fabric", "precision")]
    scaled = any(
        constant(program, given(program, call, word)) in _HALF
        for name, word in told
        for call in program.named.get(name, [])
    )
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        for call in program.named.get(name, []) if scaled else []:
            unscaled = program.named.get("unscale_gradients", [])
            if qualified(program, call.func).startswith("torch.nn.utils") and not unscaled:
                yield call


def _in_hooks(program: Program) -> Iterator[ast.Call]:
    """Clipping in Lightning's on_after_backward, which comes before its scaler divides."""
    half = any(
        constant(program, given(program, call, "precision")) in _HALF for call in program.named.get("Trainer", [])
    )
    if not half or not library(program, "lightning", "pytorch_lightning"):
        return
    for function in program.methods.get("on_after_backward", []):
        for call in walk(function):
            if isinstance(call, ast.Call) and (
                last_name(call.func) in _CLIPS or last_name(call.func) == "clip_gradients"
            ):
                yield call


def _in_apex(program: Program) -> Iterator[ast.Call]:
    """Clipping within `with amp.scale_loss(...)`, at whose end the gradients are divided."""
    for scale in program.named.get("scale_loss", []):
        source = program.owner[scale]
        outer = next((each for each in above(source, scale) if isinstance(each, ast.With)), None)
        if outer is not None and any(scale is item.context_expr for item in outer.items):
            yield from (
                call
                for part in outer.body
                for call in walk(part)
                if isinstance(call, ast.Call) and last_name(call.func) in _CLIPS
            )
