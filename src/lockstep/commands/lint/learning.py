"""Learning rates: where optimizers and schedules get them from, and whether they grow with the number of processes."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.depends import entering
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.ranks import is_world
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.roles import given, optimizers
from lockstep.commands.lint.source import Binding, Function
from lockstep.commands.lint.tree import children, text_of, walk

_CLASS = re.compile(r"(^|\.)optim\.(?!lr_scheduler)(\w+\.)?[A-Z]\w*$")
_STEPS = 12  # names and calls followed in a row


@remembered
def optimizer_calls(program: Program) -> list[ast.Call]:
    """The calls that make an optimizer: of a class by its name, from a dictionary, by getattr, or a local subclass."""
    found = list(optimizers(program))
    for call in program.calls:
        if call not in found and _makes_optimizer(program, call):
            found.append(call)
    return found


def _makes_optimizer(program: Program, call: ast.Call) -> bool:
    if last_name(call.func) == "partial":  # whose rate it is given already
        return bool(call.args) and bool(_CLASS.search(qualified(program, call.args[0])))
    owner = definition(program, call.func)
    if isinstance(owner, ast.ClassDef):
        return any(last_name(base) == "Optimizer" or _CLASS.search(qualified(program, base)) for base in owner.bases)
    if owner is not None or (isinstance(call.func, ast.Attribute) and callee(program, call) is not None):
        return False
    if isinstance(call.func, ast.Attribute) and call.func.attr != "get":
        return _takes_parameters(call)
    if isinstance(call.func, ast.Name) and qualified(program, call.func):
        return _takes_parameters(call)  # a library's, or a builtin
    return _takes_parameters(call) or any(_names_class(program, made) for made in origins(program, call.func))


def _takes_parameters(call: ast.Call) -> bool:
    """Lion(model.parameters(), lr=...): what takes parameters and a rate, whosoever class it is."""
    rated = any(each.arg in ("lr", "learning_rate") for each in call.keywords)
    return rated and bool(call.args) and ".parameters()" in text_of(call.args[0])


def _names_class(program: Program, made: ast.AST) -> bool:
    """getattr(torch.optim, name), or an entry of a dictionary of classes."""
    match made:
        case ast.Call(func=ast.Name(id="getattr"), args=[module, *_]):
            return bool(re.search(r"(^|\.)optim$", qualified(program, module)))
        case ast.Subscript(value=table) | ast.Call(func=ast.Attribute(value=table, attr="get")):
            known = [each for each in origins(program, table) if isinstance(each, ast.Dict)]
            return any(_CLASS.search(qualified(program, each)) for one in known for each in one.values)
        case ast.Attribute():
            return bool(_CLASS.search(qualified(program, made)))
    return False


@remembered
def rates(program: Program) -> list[ast.expr]:
    """The learning rates that optimizers are given, for all parameters or for a group of them."""
    found = []
    for call in optimizer_calls(program):
        rate = given(program, call, "lr", -1 if last_name(call.func) == "partial" else 1)
        found += [rate] if rate is not None else []
        found += [each for part in call.args[:1] for each in _of_groups(program, part)]
    return found


def _of_groups(program: Program, parameters: ast.expr) -> Iterator[ast.expr]:
    """The rates of [{"params": ..., "lr": ...}]."""
    for made in origins(program, parameters):
        for each in walk(made) if isinstance(made, ast.List | ast.ListComp) else []:
            if isinstance(each, ast.Dict):
                for key, value in zip(each.keys, each.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "lr":
                        yield value
            elif isinstance(each, ast.Call) and last_name(each.func) == "dict":
                yield from (one.value for one in each.keywords if one.arg == "lr")


_PEAK = {"OneCycleLR": ("max_lr", 1), "CyclicLR": ("max_lr", 2)}
_FACTOR = {"LinearLR": ("end_factor", 2), "GradualWarmupScheduler": ("multiplier", 1)}
_LAMBDA = {"LambdaLR": ("lr_lambda", 1), "MultiplicativeLR": ("lr_lambda", 1)}


def _arguments(program: Program, table: dict[str, tuple[str, int]]) -> Iterator[ast.expr]:
    for name, (argument, place) in table.items():
        for call in program.named.get(name, []):
            value = given(program, call, argument, place)
            if value is not None:
                yield value


@remembered
def peaks(program: Program) -> list[ast.expr]:
    """The highest rates of schedules that set the rate themselves."""
    return list(_arguments(program, _PEAK))


@remembered
def factors(program: Program) -> list[ast.expr]:
    """What schedules multiply an optimizer's rate by: the last factor, or what a schedule's function returns."""
    found = list(_arguments(program, _FACTOR))
    for value in _arguments(program, _LAMBDA):
        for part in value.elts if isinstance(value, ast.List) else [value]:
            for made in origins(program, part):
                if isinstance(made, ast.Lambda):
                    found.append(made.body)
                elif isinstance(made, Function):
                    found += [each for each in returns(program, made) if each is not None]
    return found


@remembered
def set_later(program: Program) -> list[Binding]:
    """What is assigned to a group's rate: group["lr"] = ..., group["lr"] *= ..."""
    return [
        binding
        for source in program.sources
        for text, found in source.attributes.items()
        if text.endswith("['lr']")
        for binding in found
        if binding.value is not None
    ]


@remembered
def made_of(program: Program, node: ast.AST) -> list[ast.AST]:
    """What a rate or a factor is computed from, by names and returns; without loaders' lengths, which tell steps."""
    waiting, seen = [node], {node: True}
    while waiting and len(seen) < 400:
        each = waiting.pop()
        if isinstance(each, ast.Call) and re.search(r"^len$|Loader$|Sampler$|^Subset$", last_name(each.func)):
            continue
        inner = [] if isinstance(each, ast.Attribute | ast.Subscript) else list(children(each))
        if isinstance(each, ast.Subscript):  # one entry of a table of settings, not all of them
            inner += [one for one in _entries(program, each) if one is not each]
        if isinstance(each, ast.Name | ast.Attribute | ast.Call):
            inner += entering(program, each)
        waiting += [one for one in inner if one not in seen]
        seen |= dict.fromkeys(inner, True)
    return list(seen)


def counts_ranks(program: Program, node: ast.AST) -> bool:
    """Whether the number of processes enters a rate or a factor."""
    return any(is_world(each) for each in made_of(program, node))


def grows(program: Program, node: ast.AST, depth: int = 0, seen: set[ast.AST] | None = None) -> ast.AST | None:
    """Where a number is multiplied by the number of processes, or by its root; None where it isn't.

    Only what the number is made of counts: what it is divided by, lengths and conditions are left out.
    """
    seen = set() if seen is None else seen
    if depth > _STEPS or node in seen:
        return None
    seen.add(node)
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            if is_scale(program, left) or is_scale(program, right):
                return node
            inner: list[ast.AST] = [left, right]
        case ast.AugAssign(op=ast.Mult(), value=value) if is_scale(program, value):
            return node
        case ast.AugAssign(op=ast.Mult() | ast.Add() | ast.Sub(), value=value):
            inner = [value]
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right) | ast.IfExp(body=left, orelse=right):
            inner = [left, right]
        case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv()):
            inner = [left]
        case ast.BoolOp(values=values):
            inner = list(values)
        case ast.NamedExpr(value=value) | ast.UnaryOp(operand=value):
            inner = [value]
        case ast.Call(func=ast.Name(id="min" | "max" | "float" | "int" | "abs" | "round"), args=args):
            inner = list(args)
        case ast.Subscript():
            inner = [each for each in _entries(program, node) if each is not node]
        case ast.Name() | ast.Attribute() | ast.Call():
            inner = list(entering(program, node))
        case _:
            return None
    found = (grows(program, each, depth + 1, seen) for each in inner)
    return next((each for each in found if each is not None), None)


def _entries(program: Program, node: ast.Subscript) -> Iterator[ast.AST]:
    """What was put at a key of a dictionary, and what it was made with."""
    yield from origins(program, node)
    text = text_of(node)
    for source in program.sources:
        for binding in source.attributes.get(text, []):
            if binding.value is not None:
                yield binding.node if binding.kind == "aug" else binding.value


def is_scale(program: Program, node: ast.AST) -> bool:
    """The number of processes as a factor: itself, a part of it (N / 8), or its root, under whatever name."""
    match node:
        case ast.BinOp(left=left, op=ast.Pow() | ast.Div()):
            return is_scale(program, left)
        case ast.Call(func=function, args=[inner]) if last_name(function) == "sqrt":
            return is_scale(program, inner)
    return is_n(node)


def is_n(node: ast.AST) -> bool:
    """The number of processes itself, through int() and the like."""
    while isinstance(node, ast.Call) and last_name(node.func) in ("int", "float", "max") and node.args:
        node = node.args[-1]
    return is_world(node)
