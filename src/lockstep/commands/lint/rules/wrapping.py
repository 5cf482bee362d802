"""Rules about devices and the wrapped model: what DDP was given, and what is called."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.depends import depends, entering
from lockstep.commands.lint.guards import guarded
from lockstep.commands.lint.learning import optimizer_calls
from lockstep.commands.lint.order import before
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.after_wrapping import after_wrapping, where
from lockstep.commands.lint.rules.by_fabric import unwrapped_calls
from lockstep.commands.lint.several import wrapped, wraps
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import calls, text_of, walk


@rule(
    "LS301",
    "wrapped-before-moved",
    "the model is moved after it was wrapped",
    result="DDP has made its buckets for the CPU's parameters: it raises, or reduces over the CPU, many times slower",
    why=".to(device) gives parameters another place after DDP has taken note of them",
    mend="model = Net().to(device)\nmodel = DistributedDataParallel(model, device_ids=[local_rank])",
)
def wrapped_before_moved(program: Program) -> Iterator[Hit]:
    """.cuda() or .to(device) of what DistributedDataParallel returned, or of the network that it was given."""
    for name in ("cuda", "to") if wrapped(program) else ():
        for call in program.named.get(name, []):
            model = call.func.value if isinstance(call.func, ast.Attribute) and _is_move(call) else None
            past = after_wrapping(program, call, model) if model is not None else []
            if model is not None and past and not _moved_before(program, past):
                yield Hit(where(program, call, model))


def _is_move(call: ast.Call) -> bool:
    if last_name(call.func) == "cuda":
        return True
    placed = bool(call.args) or any(each.arg == "device" for each in call.keywords)
    return placed and "dtype" not in text_of(call) and "float" not in text_of(call)


def _moved_before(program: Program, past: list[ast.Call]) -> bool:
    """Whether the model was on its device when it was wrapped: then the second move does nothing."""
    for made in past:
        inner = made.args[0] if made.args else None
        while (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and last_name(inner.func) not in ("to", "cuda")
        ):
            inner = inner.func.value
        if isinstance(inner, ast.Call) and last_name(inner.func) in ("to", "cuda"):
            return True
        if inner is not None and (_made_moved(program, inner) or _made_there(program, inner)):
            return True
        source = program.owner[made]
        for other in [*program.named.get("to", []), *program.named.get("cuda", [])]:
            same = (
                isinstance(other.func, ast.Attribute)
                and isinstance(inner, ast.Name | ast.Attribute | ast.Subscript)
                and ast.dump(other.func.value) == ast.dump(inner)
            )
            if same and program.owner[other] is source and _above(program, other, made):
                return True
    return False


def _above(program: Program, one: ast.Call, other: ast.Call) -> bool:
    """Whether a call is come by before another of the same name's object: a local name's, in the same function."""
    source = program.owner[one]
    here = function_of(source, one) is function_of(source, other)
    local = isinstance(one.func, ast.Attribute) and isinstance(one.func.value, ast.Name)
    if here or local:
        return here and one.lineno < other.lineno
    earlier = before(program, one, other)
    return one.lineno < other.lineno if earlier is None else earlier


def _moves(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda")


def _made_moved(program: Program, model: ast.expr) -> bool:
    """Whether a model was moved where it was made: Net().cuda(), or in the local function that returned it."""
    values: list[ast.AST] = [model]
    for binding in reaching(program, model, bindings(program, model, model.id)) if isinstance(model, ast.Name) else []:
        values += entering(program, model) if binding.kind == "param" else [binding.value or model]
    for each in values:
        function = callee(program, each) if isinstance(each, ast.Call) else None
        made_in = function is not None and function.name != "__init__"
        if _moves(each) or (made_in and function is not None and any(map(_moves, walk(function)))):
            return True
    return False


def _made_there(program: Program, model: ast.expr) -> bool:
    """Whether a model is made on its device: within `with torch.device(...)`, or by a default device."""
    if program.named.get("set_default_device"):
        return True
    for made in origins(program, model):
        outer = above(program.owner[made], made) if made in program.owner else ()
        for each in outer:
            if isinstance(each, ast.With) and any("device(" in text_of(item) for item in each.items):
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
    if _reduced_by_hand(program):
        return
    for loop in step_loops(program):
        told = set[ast.Call]()
        for node in inside(program, loop):
            past = _past(program, node) or _held_by(program, node) if isinstance(node, ast.Call) and node.args else []
            if not past or told & set(past) or guarded(program, node):
                continue
            assert isinstance(node, ast.Call)
            if _trains(program, node, loop, past):
                told |= set(past)
                yield Hit(node)


def _past(program: Program, node: ast.Call) -> list[ast.Call]:
    """The wrappers that a call of a model goes past: ddp.module(x), net(x), and methods of either."""
    match node.func:
        case ast.Attribute(attr="module", value=owner) | ast.Attribute(value=ast.Attribute(attr="module", value=owner)):
            return wraps(program, owner)
    model: ast.expr = node.func
    if definition(program, model) is None and isinstance(model, ast.Attribute) and not _holds(program, model):
        model = model.value  # net.loss(x, y)
    if isinstance(model, ast.Call) and callee(program, model) is None:
        return []
    named = isinstance(model, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
    if not named or (not isinstance(model, ast.Call) and (qualified(program, model) or definition(program, model))):
        return []
    made = origins(program, model)
    if not made or wraps(program, model) or not all(isinstance(each, ast.Call) for each in made):
        return []
    return [each for each in wrapped(program) if each.args and set(origins(program, each.args[0])) & set(made)]


def _held_by(program: Program, node: ast.Call) -> list[ast.Call]:
    """The wrappers that a local module's forward goes past, by a network that the module was given: step(x, y)."""
    found = list[ast.Call]()
    for made in origins(program, node.func) if isinstance(node.func, ast.Name | ast.Attribute) else []:
        owner = definition(program, made.func) if isinstance(made, ast.Call) else None
        forward = method(program, owner, "forward") if isinstance(owner, ast.ClassDef) else None
        for each in calls(forward) if forward is not None else []:
            if wraps(program, each.func):
                return []
            owned = isinstance(each.func, ast.Attribute) and each.args and _holds(program, each.func)
            found += _past(program, each) if owned and not _quietly(program, each) else []
    return found


def _holds(program: Program, node: ast.Attribute) -> bool:
    """Whether an attribute was assigned, and is no method."""
    return origins(program, node) != [node]


def _trains(program: Program, node: ast.Call, loop: ast.AST, past: list[ast.Call]) -> bool:
    """Whether a call's result enters a backward pass: no no_grad around, no call of the wrapper beside it.

    A method's result has to be what backward() starts from: others fill buffers or regularise.
    """
    if _quietly(program, node):
        return False
    within = [each for each in inside(program, loop) if isinstance(each, ast.Call)]
    for each in within:
        if each.args and isinstance(each.func, ast.Name | ast.Attribute) and set(wraps(program, each.func)) & set(past):
            return False
    others = any(
        each.args and isinstance(each.func, ast.Name | ast.Attribute) and wraps(program, each.func) for each in within
    )
    method = isinstance(node.func, ast.Attribute) and node.func.attr != "module" and not _holds(program, node.func)
    if not others and not method:
        return True
    return _optimized(program, past) and any(
        depends(program, each.func.value, lambda one: one is node)
        for each in within
        if isinstance(each.func, ast.Attribute) and each.func.attr == "backward"
    )


def _quietly(program: Program, node: ast.AST) -> bool:
    """Whether gradients are switched off around a place."""
    for outer in above(program.owner[node], node):
        around: list[ast.AST] = list(outer.items) if isinstance(outer, ast.With) else []
        around += outer.decorator_list if isinstance(outer, Function) else []
        if any(re.search("no_grad|inference|eval", text_of(item)) for item in around):
            return True
    return False


def _optimized(program: Program, past: list[ast.Call]) -> bool:
    """Whether an optimizer is given the parameters of what a wrapper holds."""
    known = [each for one in past for each in (one, *origins(program, one.args[0]))]
    return any(
        set(origins(program, part.value)) & set(known)
        for call in optimizer_calls(program)
        for given_one in call.args[:1]
        for part in walk(given_one)
        if isinstance(part, ast.Attribute) and part.attr in ("parameters", "named_parameters")
    )


def _reduced_by_hand(program: Program) -> bool:
    return any(".grad" in text_of(call) for call in program.named.get("all_reduce", []))
