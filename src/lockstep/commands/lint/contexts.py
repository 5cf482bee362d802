"""What single statements mean for models' modes: whether they say one, switch gradients off, or make an optimizer."""

import ast
import re
from dataclasses import dataclass, field

from lockstep.commands.lint.frames import Frame, Key, held, truth
from lockstep.commands.lint.places import inside, over_loader
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.sites import Site
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import children, text_of, walk


@dataclass(frozen=True)
class Mode:
    """What was said last of a model's mode. `call` None: nobody knows. `used`: it has been evaluated since."""

    training: bool
    call: ast.Call | None
    used: bool = False
    under: frozenset[str] = frozenset()  # the conditions around


UNKNOWN = Mode(training=False, call=None)
Modes = dict[Key, frozenset[Mode]]


@dataclass(frozen=True, eq=False)
class Use:
    """A call of a model in a pass of a loop."""

    key: Key
    call: ast.Call
    modes: frozenset[Mode]
    gradients: bool


@dataclass(eq=False)
class Pass:
    """One pass of a loop: the models that it called, and whether it ran a backward pass itself."""

    loop: ast.AST
    frame: Frame
    uses: list[Use] = field(default_factory=list)
    backward: bool = False


@dataclass(eq=False)
class Run:
    """The whole walk: what it has seen."""

    program: Program
    backward: set[ast.Call]
    started: dict[ast.Call, list[Site]]
    modes: Modes = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)  # those that are over
    within: list[Pass] = field(default_factory=list)
    trained: set[Key] = field(default_factory=set)
    under: tuple[str, ...] = ()
    quiet: int = 0  # how many no_grad() are around
    active: list[Function] = field(default_factory=list)
    count: int = 0


@remembered
def matters(program: Program, function: Function) -> bool:
    """Whether a function says a mode, makes an optimizer, or runs over something."""
    names = ("eval", "train", "backward", "parameters", "named_parameters")
    return any(
        isinstance(each, Loop) or (isinstance(each, ast.Call) and last_name(each.func) in names)
        for each in inside(program, function)
    )


def few(program: Program, node: Loop, frame: Frame) -> list[ast.expr]:
    """What `for phase in ("train", "val")` takes."""
    value = held(program, node.iter, frame)[0] if isinstance(node, ast.For) else None
    return list(value.elts) if isinstance(value, ast.Tuple | ast.List) and len(value.elts) < 5 else []


def silences(program: Program, node: ast.expr, frame: Frame) -> bool:
    """Whether a context switches gradients off."""
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    if name == "set_grad_enabled" and isinstance(node, ast.Call) and node.args:
        return truth(program, node.args[0], frame) is False
    return name in ("no_grad", "inference_mode")


def quiet(node: ast.AST) -> bool:
    """Whether no_grad or inference_mode stands somewhere in it."""
    text = text_of(node)
    return "no_grad" in text or "inference_mode" in text


def around_yield(body: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """A context manager's statements before and after its yield."""
    for number, node in enumerate(body):
        if any(isinstance(each, ast.Yield) for each in walk(node)):
            if isinstance(node, ast.With):
                before, after = around_yield(node.body)
            elif isinstance(node, ast.Try):
                before, after = around_yield(node.body)
                after = [*after, *node.finalbody]
            else:
                before, after = [], []
            return [*body[:number], *before], [*after, *body[number + 1 :]]
    return body, []


@remembered
def says_mode(program: Program, function: Function) -> bool:
    """Whether a function, or what it calls, says a mode."""
    return any(isinstance(e, ast.Call) and last_name(e.func) in ("eval", "train") for e in inside(program, function))


@remembered
def optimized(_: Program, node: ast.Call) -> list[ast.expr]:
    """The models whose parameters a call is given, other than to clip or to walk over them."""
    name = last_name(node.func).lower()
    if re.search(r"clip|zip|norm|sum|len|count|numel|print|next|any|all|set|enumerate|average|update|grad", name):
        return []
    found = list[ast.expr]()
    for part in [*node.args, *(each.value for each in node.keywords)]:
        if isinstance(part, ast.Name | ast.Attribute) and re.search(r"optim|param_group", name):
            found.append(part)
        known = [each for each in walk(part) if isinstance(each, ast.Attribute)]
        found += [each.value for each in known if each.attr in ("parameters", "named_parameters")]
    return found


@remembered
def calls_of(_: Program, node: ast.AST) -> list[ast.Call]:
    """The calls of an expression or a simple statement, the inner ones first."""
    found, waiting = list[ast.Call](), list(children(node))
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Call):
            found.append(each)
        if not isinstance(each, ast.Lambda):
            waiting += children(each)
    return [*found[::-1], *([node] if isinstance(node, ast.Call) else [])]


@remembered
def comprehension(program: Program, node: ast.stmt) -> ast.comprehension | None:
    """The part `for x, y in loader` of a comprehension within a statement."""
    parts = [each for each in walk(node) if isinstance(each, ast.comprehension)]
    return next((each for each in parts if over_loader(program, each)), None)


def of_module(function: Function) -> bool:
    """Whether a method is a module's own train() or eval(), which hands on to torch's."""
    return "super()" in text_of(function)


def joined(one: Modes, other: Modes, text: str) -> Modes:
    """Both ways' modes; what was said under the same condition before is what the first way has changed."""
    found = {}
    for each in one.keys() | other.keys():
        left, right = one.get(each, frozenset({UNKNOWN})), other.get(each, frozenset({UNKNOWN}))
        if left != right:
            right = frozenset(mode for mode in right if text not in mode.under)
        found[each] = left | right
    return found
