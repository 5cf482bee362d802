"""Which values of a training step are tensors that the device computes: what a model gave, and what comes of it."""

import ast
import re

from lockstep.commands.lint.around import class_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.parts import turns
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.places import backwards, model_calls
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of

_DEPTH = 10
# calls that give no tensor of the device, or a number that has been waited for
_NUMBERS = re.compile(
    r"item|tolist|float|int|bool|len|size|dim|numel|ndimension|isinstance|range|enumerate|zip|cpu|numpy|print|str|format"
    r"|repr|type|id|hasattr|update|append|extend|log|info|debug|add_scalar|write|save|get_world_size|get_rank|time"
    r"|perf_counter|backward|step|zero_grad|state_dict|keys|parameters|named_parameters|isnan|isfinite|isinf"
)


@remembered
def computed(program: Program) -> set[ast.AST]:
    """The calls of models in the program's files, and the losses that backward passes begin from."""
    found: set[ast.AST] = set()
    for source in program.sources:
        found.update(model_calls(program, source.tree))
    for call in backwards(program):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        for node in [owner, *call.args]:
            if isinstance(node, ast.Name):
                found.add(node)
    return found


def is_tensor(program: Program, node: ast.AST | None, depth: int = 0) -> bool:
    """Whether a value is a tensor that comes from a model's output, for all that is known."""
    if node is None or depth > _DEPTH:
        return False
    key = ("tensor", node)
    if key not in program.memo:
        program.memo[key] = False  # a circle adds nothing
        program.memo[key] = _is_tensor(program, node, depth)
    return bool(program.memo[key])


def _is_tensor(program: Program, node: ast.AST, depth: int) -> bool:
    if node in computed(program) and isinstance(node, ast.Call):
        return True
    match node:
        case ast.Name(id=name):
            return _named(program, node, name, depth)
        case ast.Attribute(value=value, attr=attr):
            if attr in ("shape", "dtype", "device", "requires_grad", "ndim", "module", "avg", "val", "count"):
                return False
            return _attribute(program, node, depth) or is_tensor(program, value, depth + 1)
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.NamedExpr(value=value):
            return is_tensor(program, value, depth + 1)
        case ast.BinOp(left=left, right=right):
            words = isinstance(left, ast.JoinedStr) or (isinstance(left, ast.Constant) and isinstance(left.value, str))
            return not words and (is_tensor(program, left, depth + 1) or is_tensor(program, right, depth + 1))
        case ast.UnaryOp(op=op, operand=operand):
            return not isinstance(op, ast.Not) and is_tensor(program, operand, depth + 1)
        case ast.Compare(left=left, ops=ops, comparators=others):
            asks = any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in ops)
            return not asks and any(is_tensor(program, each, depth + 1) for each in [left, *others])
        case ast.IfExp(body=body, orelse=other):
            return is_tensor(program, body, depth + 1) or is_tensor(program, other, depth + 1)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(is_tensor(program, each, depth + 1) for each in parts)
        case ast.Call():
            return _called(program, node, depth)
    return False


def _called(program: Program, call: ast.Call, depth: int) -> bool:
    function = callee(program, call)
    if function is not None and function.name not in ("__init__", "forward", "__call__"):
        return any(is_tensor(program, each, depth + 1) for each in returns(program, function))
    name = last_name(call.func)
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    tests = owner is not None and (text_of(owner) in ("torch", "th") or is_tensor(program, owner, depth + 1))
    turns = isinstance(call.func, ast.Attribute) and name in ("float", "int", "bool", "type")
    if _NUMBERS.fullmatch(name) and not turns and not (tests and name.startswith("is")):
        return False
    parts = [*call.args, *(each.value for each in call.keywords)]
    if owner is not None:
        if text_of(owner) in ("math", "np", "numpy", "time", "os", "json", "logging", "wandb"):
            return False
        parts.append(owner)
    elif name[:1].isupper() or name in (
        "min",
        "max",
        "sorted",
        "round",
        "dict",
        "list",
        "set",
        "next",
        "iter",
        "getattr",
    ):
        return False
    return any(is_tensor(program, each, depth + 1) for each in parts)


def _named(program: Program, node: ast.Name, name: str, depth: int) -> bool:
    found = bindings(program, node, name)
    if any(each.kind == "param" for each in found):
        return _given(program, node, name, depth)
    for each in reaching(program, node, found):
        if each.kind == "item" and each.value is not None:
            parts = list(turns(each.value, each.path, lambda one: origins(program, one)))
            if parts and not any(path for _, path in parts):
                return all(is_tensor(program, part, depth + 1) for part, _ in parts)
        if (
            each.kind in ("value", "aug", "with")
            and each.value is not None
            and is_tensor(program, each.value, depth + 1)
        ):
            return not (each.path and _a_number(program, each.value, each.path, depth))
    return False


def _a_number(program: Program, value: ast.AST, path: tuple[int, ...], depth: int) -> bool:
    """Whether a place of a tuple that a local function returns, or that is written out, holds no tensor."""
    function = callee(program, value) if isinstance(value, ast.Call) else None
    given = list(returns(program, function)) if function is not None else [value]
    parts = [at(each.elts, path[0]) for each in given if isinstance(each, ast.Tuple)]
    known = [each for each in parts if each is not None]
    return bool(known) and not any(is_tensor(program, each, depth + 1) for each in known)


def _given(program: Program, node: ast.Name, name: str, depth: int) -> bool:
    """Whether a parameter is given a tensor, by each that calls the function."""
    source = program.owner[node]
    function = source.scopes[node]
    own = bindings(program, node, name)
    later = [each for each in reaching(program, node, own) if each.kind in ("value", "aug")]
    if any(is_tensor(program, each.value, depth + 1) for each in later):
        return True
    if later and all(each.kind == "value" for each in later):
        return False
    if not isinstance(function, Function):
        return False
    values = [argument(site, name) for site in sites(program, function)]
    return bool(values) and all(is_tensor(program, each, depth + 1) for each in values)


def _attribute(program: Program, node: ast.Attribute, depth: int) -> bool:
    source, text = program.owner[node], text_of(node)
    own = class_of(source, node) if text.startswith("self.") else None
    found = [each for each in source.attributes.get(text, []) if own is None or class_of(source, each.node) is own]
    values = [each.value for each in found if each.kind in ("value", "aug") and not each.path]
    return any(is_tensor(program, each, depth + 1) for each in values)
