"""What each training step comes by: the nodes of a loop's pass, and of the functions and hooks that it runs."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.dispatch import hooks, hooks_run
from lockstep.commands.lint.places import backwards, step_loops
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.ranks import is_first, rank_like
from lockstep.commands.lint.rules.by_ignite import engine_step
from lockstep.commands.lint.several import library, lightning
from lockstep.commands.lint.sites import Site, argument
from lockstep.commands.lint.source import Function, Loop, parameters
from lockstep.commands.lint.tree import children, text_of, walk

_SEVERAL = re.compile(
    r"is_(dist_?)?(avail\w*|initialized|distributed)|world(_size)?(\(\))? > 1|^(\w+\.)?distributed$|is_dist"
)
_SWITCHES = re.compile(r"debug|profil|verbose|log|print|timing|bench|every|freq|interval")
_HOOKS = (
    "training_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_after_backward",
    "on_before_backward",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "optimizer_step",
)
_MOST = 4000  # nodes of one step


@dataclass
class _Walk:
    program: Program
    steps: set[ast.AST]  # backward passes and optimizers' steps
    found: list[ast.AST] = field(default_factory=list)
    seen: set[tuple[Function, str]] = field(default_factory=set)

    def block(self, body: list[ast.stmt]) -> None:
        for place, each in enumerate(body):
            self.visit(each)
            leaves = isinstance(each, ast.If) and _leaves(each) and not about_ranks(self.program, each.test)
            if leaves and not any(self.holds(later) for later in body[place + 1 :]):
                return

    def holds(self, node: ast.AST) -> bool:
        """Whether a step's backward pass, or the optimizer's step, stands within a node."""
        return any(each in self.steps for each in walk(node))

    def visit(self, node: ast.AST) -> None:
        if len(self.found) > _MOST or isinstance(node, Function | ast.Lambda | ast.ClassDef):
            return
        self.found.append(node)
        match node:
            case ast.If(test=test, body=body, orelse=other):
                self.visit(test)
                for block in (body, other):
                    if any(map(self.holds, block)) or (block is body and about_ranks(self.program, test)):
                        self.block(block)
            case ast.Try(body=body, finalbody=last):
                self.block([*body, *last])
            case ast.While() | ast.Match():
                if self.holds(node):
                    self.block(node.body if isinstance(node, ast.While) else [])
            case ast.IfExp(test=test) | ast.BoolOp(values=[test, *_]):
                self.visit(test)
            case ast.For(iter=source, body=body) | ast.AsyncFor(iter=source, body=body):
                self.visit(source)
                self.block(body)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self.visit(item)
                self.block(body)
            case _:
                for child in children(node):
                    self.visit(child)
        if isinstance(node, ast.Call):
            self.call(node)

    def call(self, node: ast.Call) -> None:
        function = callee(self.program, node)
        if function is not None:
            self.run(function, node)
        elif isinstance(node.func, ast.Attribute):
            for each in hooks_run(self.program, node):
                self.run(each, None)

    def run(self, function: Function, call: ast.Call | None) -> None:
        names = _dispatched(self.program, function, call) if call is not None else []
        key = (function, " ".join(names))
        if key in self.seen:
            return
        self.seen.add(key)
        if _evaluates(function) and not self.holds(function):
            return  # once in an epoch, whose loop is the step's where one batch holds all
        for around in _decorators(self.program, function):
            self.block(around.body)
        self.block(function.body)
        for name in names:
            for each in hooks(self.program, name):
                self.run(each, None)


def _decorators(program: Program, function: Function) -> Iterator[Function]:
    """What local decorators put in a function's place, which runs at each call of it."""
    for mark in function.decorator_list:
        local = definition(program, mark.func if isinstance(mark, ast.Call) else mark)
        if isinstance(local, Function):
            yield from (each for each in walk(local) if isinstance(each, Function) and each is not local)


def _handing_on(program: Program, loop: Loop) -> list[ast.stmt]:
    """What a local generator runs for each batch that it hands on to a loop."""
    made = loop.iter if isinstance(loop, ast.For) else None
    if isinstance(made, ast.Call) and last_name(made.func) in ("enumerate", "tqdm") and made.args:
        made = made.args[0]
    function = callee(program, made) if isinstance(made, ast.Call) else None
    inner = [each for each in walk(function) if isinstance(each, ast.For)] if function is not None else []
    return [part for each in inner if any(isinstance(one, ast.Yield) for one in walk(each)) for part in each.body]


def _evaluates(function: Function) -> bool:
    return any(isinstance(each, ast.Call) and last_name(each.func) == "eval" for each in walk(function))


def about_ranks(program: Program, test: ast.expr) -> bool:
    """Whether a condition asks for a rank, for several processes or for the group's last batch, and nothing else."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return about_ranks(program, inner)
        case ast.BoolOp(values=values):
            return all(about_ranks(program, each) for each in values)
        case ast.Compare(left=left, comparators=[ast.Constant() | ast.UnaryOp()]) if rank_like(program, left):
            return not any(isinstance(each, ast.BinOp) for each in walk(left))
        case ast.Attribute(attr="sync_gradients"):
            return True  # of Accelerate: in each step of the optimizer
        case ast.Name() | ast.Attribute() | ast.Call():
            name = last_name(test.func if isinstance(test, ast.Call) else test).lower()
            if is_first(name):
                return True
    return bool(_SEVERAL.search(text_of(test).lower())) and not _SWITCHES.search(text_of(test).lower())


def _leaves(condition: ast.If) -> bool:
    return bool(condition.body) and isinstance(condition.body[-1], ast.Continue | ast.Return)


def _dispatched(program: Program, function: Function, call: ast.Call) -> list[str]:
    """The names of the methods that a function runs by getattr(hook, name)(), where the call gives the name."""
    found = []
    for each in walk(function):
        match each:
            case ast.Call(func=ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Name(id=name), *_])):
                bound = isinstance(program.owner[function].parents[function], ast.ClassDef)
                value = argument(Site(call, function, list(call.args), int(bound)), name)
                if name in [one.arg for one in parameters(function)] and isinstance(value, ast.Constant):
                    found.append(str(value.value))
    return found


@remembered
def each_step(program: Program) -> list[tuple[ast.AST, list[ast.AST]]]:
    """What runs training steps -> the nodes that each step comes by, in the order of the walk.

    That is a loop over batches; a method that Lightning calls for each batch; a function that Ignite runs so.
    """
    steps: set[ast.AST] = {*backwards(program)}
    for call in program.named.get("step", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is not None and re.search(r"opt|scaler", text_of(owner).lower()):
            steps.add(call)
    found: list[tuple[ast.AST, list[ast.AST]]] = []
    for root, body in _roots(program):
        walk = _Walk(program, steps)
        walk.block([*_handing_on(program, root), *body] if isinstance(root, Loop) else body)
        found.append((root, walk.found))
    return found


def _roots(program: Program) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    for loop in step_loops(program):
        yield loop, loop.body
    if lightning(program):
        for name in _HOOKS:
            yield from ((each, each.body) for each in program.methods.get(name, []))
    if library(program, "ignite"):
        for function in _of_ignite(program):
            yield function, function.body


def _of_ignite(program: Program) -> Iterator[Function]:
    """The training steps of Ignite's engines, and the handlers of each iteration of an engine that trains."""
    trains = set(backwards(program))
    for call in program.named.get("Engine", []):
        step = engine_step(program, call)
        if step is not None and any(each in trains for each in walk(step)):
            yield step
    for source in program.sources:
        for node in source.functions:
            if any(_each_iteration(one) for one in node.decorator_list):
                yield node
    for call in program.named.get("add_event_handler", []):
        handler = definition(program, call.args[1]) if len(call.args) > 1 and _each_iteration(call) else None
        if isinstance(handler, Function):
            yield handler


def _each_iteration(node: ast.expr) -> bool:
    """`trainer.on(Events.ITERATION_COMPLETED)`, without `every`."""
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute):
        return False
    event, owner = text_of(node.args[0]), text_of(node.func.value)
    return bool(re.fullmatch(r"(\w+\.)*Events\.ITERATION_(COMPLETED|STARTED)", event)) and "train" in owner
