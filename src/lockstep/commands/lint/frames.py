"""Values as a function sees them in one call of it: what its parameters were given, and which object a model is."""

import ast
from collections.abc import Hashable
from dataclasses import dataclass, field

from lockstep.commands.lint.around import class_of
from lockstep.commands.lint.ddp import is_ddp
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.sites import Site, argument, default
from lockstep.commands.lint.source import Binding, Function

Key = frozenset[Hashable]  # the expressions that made an object

_INNER = ("module", "_orig_mod", "_forward_module")
_SAME = ("to", "cuda", "cpu", "eval", "train", "float", "half", "requires_grad_", "apply", "share_memory")
_AROUND = ("DataParallel", "FullyShardedDataParallel", "FSDP", "compile", "unwrap_model", "unwrap", "fully_shard")


@dataclass(eq=False)
class Frame:
    """One call of a function. `given`: parameters and names of a loop over a few values -> the value, and its frame."""

    function: Function | None = None
    given: dict[str, tuple[ast.expr, "Frame"]] = field(default_factory=dict)
    depth: int = 0


def entered(site: Site, frame: Frame) -> Frame:
    """The frame of a function that is called."""
    inner = Frame(site.function, depth=frame.depth + 1)
    parameters = [*site.function.args.posonlyargs, *site.function.args.args, *site.function.args.kwonlyargs]
    for number, each in enumerate(parameters):
        value = argument(site, each.arg)
        if value is not None:
            inner.given[each.arg] = (value, frame)
        elif number == 0 and site.offset and not site.spawned and isinstance(site.call.func, ast.Attribute):
            inner.given[each.arg] = (site.call.func.value, frame)
        elif (value := default(site.function, each.arg)) is not None:
            inner.given[each.arg] = (value, Frame())
    return inner


def held(program: Program, node: ast.expr, frame: Frame, depth: int = 0) -> tuple[ast.expr, Frame]:
    """The expression that a value comes from, through parameters of this call and names bound once above."""
    if isinstance(node, ast.Name) and depth < 12:
        found = reaching(program, node, bindings(program, node, node.id))
        only = found[0] if len(found) == 1 else None
        if only is not None and only.kind in ("param", "item") and node.id in frame.given:
            value, outer = frame.given[node.id]
            return held(program, value, outer, depth + 1)
        if only is not None and _plain(only) and isinstance(only.value, ast.expr):
            return held(program, only.value, frame, depth + 1)
    return node, frame


def _plain(binding: Binding) -> bool:
    return binding.kind == "value" and not binding.path


def key(program: Program, node: ast.expr, frame: Frame, depth: int = 0) -> Key | None:
    """Which model an expression is; None where that can't be told."""
    node, frame = held(program, node, frame)
    if depth > 12:
        return None
    match node:
        case ast.Attribute(value=value, attr=attr) if attr in _INNER:
            return key(program, value, frame, depth + 1)
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _SAME:
            return key(program, value, frame, depth + 1)
        case ast.Call(args=[first, *_]) if is_ddp(program, node) or last_name(node.func) in _AROUND:
            return key(program, first, frame, depth + 1)
    found = set[Hashable]()
    for made in origins(program, node):
        inner: Key | None = None
        if isinstance(made, ast.Call) and made.args and (is_ddp(program, made) or last_name(made.func) in _AROUND):
            inner = key(program, made.args[0], Frame(), depth + 1)
        elif isinstance(made, ast.Attribute) and made.attr in _INNER:
            inner = key(program, made.value, Frame(), depth + 1)
        elif isinstance(made, ast.Call | ast.arg):
            inner = frozenset({made})
        elif isinstance(made, ast.Attribute) and isinstance(made.value, ast.Name) and made.value.id == "self":
            inner = frozenset({(class_of(program.owner[made], made), made.attr)})
        elif isinstance(made, ast.Constant) and made.value is None:
            inner = frozenset()
        if inner is None:
            return None
        found |= inner
    return frozenset(found) or None


def truth(program: Program, node: ast.expr, frame: Frame) -> bool | None:
    """Whether a condition holds in this call; None where that depends on more."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            known = truth(program, inner, frame)
            return None if known is None else not known
        case ast.BoolOp(op=op, values=values):
            found = [truth(program, each, frame) for each in values]
            decisive = isinstance(op, ast.Or)
            if decisive in found:
                return decisive
            return None if None in found else not decisive
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(program, left, op, right, frame)
    value, _ = held(program, node, frame)
    return bool(value.value) if isinstance(value, ast.Constant) else None


def _compared(program: Program, left: ast.expr, op: ast.cmpop, right: ast.expr, frame: Frame) -> bool | None:
    if isinstance(left, ast.Name) and left.id == "__name__":
        return True
    (one, _), (other, _) = held(program, left, frame), held(program, right, frame)
    same: bool | None = None
    if isinstance(one, ast.Constant) and isinstance(other, ast.Constant):
        same = one.value == other.value
    elif isinstance(other, ast.Constant) and other.value is None and isinstance(one, ast.Call):
        same = False
    elif (
        isinstance(op, ast.In | ast.NotIn) and isinstance(other, ast.Tuple | ast.List) and isinstance(one, ast.Constant)
    ):
        texts = [each.value for each in other.elts if isinstance(each, ast.Constant)]
        same = one.value in texts if len(texts) == len(other.elts) else None
        return None if same is None else same == isinstance(op, ast.In)
    if same is None or not isinstance(op, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
        return None
    return same == isinstance(op, ast.Eq | ast.Is)
