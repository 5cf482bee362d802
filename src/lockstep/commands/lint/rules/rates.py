"""Rules about batch size, learning rate and schedule: which experiment N processes run."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import is_world, on_world
from lockstep.commands.lint.roles import (
    given,
    library,
    lightning,
    loaders,
    of_loader,
    optimizers,
    sharding,
    training_loaders,
    wrapped,
)
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed
from lockstep.commands.lint.rules.evaluation import prepared
from lockstep.commands.lint.rules.reading import meant_for_all

_EACH = re.compile(
    r"per[ _-]?(gpu|device|process|proc|rank|worker|node|core)|(each|every|a) (gpu|device|process|rank)|micro|local"
    r"|each|_rank|每(张|个|块)|单卡"
)
_ONE = re.compile(
    r"(of|for|on|per) (one |a single |1 )?(gpu|device|process|rank|worker)|for (a )?batch(es)?( size)?( of)? \d+"
)


def _rates(program: Program) -> list[ast.expr]:
    """The learning rates that optimizers are given."""
    found = []
    for call in optimizers(program):
        rate = given(program, call, "lr", 1)
        if rate is not None:
            found.append(rate)
    return found


@rule(
    "LS208",
    "not-adjusted-to-n",
    "neither batch size nor learning rate knows the number of processes",
    result="N processes train another experiment: on 4 processes 4 times the batch, a quarter of the steps, at the "
    "same rate",
    why="a loader's batch size is its own process's, so the global batch is N times that",
    mend="DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)  # the same experiment\n"
    "SGD(model.parameters(), lr=lr * world_size)  # or another one, on purpose",
)
def not_adjusted(program: Program) -> Iterator[Hit]:
    """Shared-out training with DDP whose batch, rate and names never mention N or a process."""
    rates = _rates(program)
    if (
        not rates
        or not (wrapped(program) or library(program, "horovod") or managed(program))
        or any(on_world(program, rate) for rate in rates)
    ):
        return
    if _rate_is_set(program):
        return
    for loader in training_loaders(program):
        batch = of_loader(program, loader, "batch_size")
        cut = sharding(program, loader) or prepared(program, loader)
        if batch is None or not cut or on_world(program, batch):
            continue
        alone = next((rate for rate in rates if _of_one_process(program, rate)), None)
        if alone is not None and not meant_for_all(program, batch):
            yield Hit(alone, f"lr={ast.unparse(alone)}, said to be one process's")
            continue
        if sharding(program, loader) and not (
            _for_each(program, batch) or _line_says(program, batch) or meant_for_all(program, batch)
        ):
            yield Hit(batch, f"batch_size={ast.unparse(batch)}")


def _rate_is_set(program: Program) -> bool:
    """Whether something sets a rate by N later: a group's lr, a schedule's lambda."""
    for call in program.calls:
        if re.search(r"LambdaLR|SequentialLR|WarmUp|warmup", last_name(call.func)) and any(
            on_world(program, each) for each in call.args
        ):
            return True
    for source in program.sources:
        for text, bindings in source.attributes.items():
            if ("'lr'" in text or text.endswith((".lr", ".learning_rate"))) and any(
                b.value is not None and on_world(program, b.value) for b in bindings
            ):
                return True
    return False


def _of_one_process(program: Program, rate: ast.expr) -> bool:
    """Whether a rate is called that of one process, or of a batch that is named, by its option's help or a comment."""
    names = [last_name(each) for each in ast.walk(rate) if isinstance(each, ast.Name | ast.Attribute)]
    words = [option(program, name)[0] for name in names]
    for each in [rate, *origins(program, rate)]:
        if isinstance(each, ast.expr):
            words.append(program.owner[each].lines[each.lineno - 1].partition("#")[2])
    return any(_ONE.search(each.lower()) for each in words)


def _for_each(program: Program, node: ast.expr) -> bool:
    """Whether a batch size is called one process's, by a name or an option's help."""

    def says(each: ast.AST) -> bool:
        name = last_name(each) if isinstance(each, ast.Name | ast.Attribute) else ""
        return bool(name) and bool(_EACH.search(name.lower()) or _EACH.search(option(program, name)[0].lower()))

    return depends(program, node, says)


def _line_says(program: Program, node: ast.expr) -> bool:
    """Whether a comment beside it, or where its name is bound, says that it is one process's."""
    source = program.owner[node]
    lines = {
        node.lineno,
        *(
            each.lineno
            for each in origins(program, node)
            if isinstance(each, ast.expr) and program.owner[each] is source
        ),
    }
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            for binding in source.names.get(source.tree, {}).get(each.id, []):
                lines.add(getattr(binding.node, "lineno", node.lineno))
    return any(
        "#" in source.lines[n - 1] and _EACH.search(source.lines[n - 1].partition("#")[2].lower())
        for line in lines
        for n in (line, line - 1)
        if n >= 1 and (n == line or source.lines[n - 1].strip().startswith("#"))
    )


@rule(
    "LS209",
    "adjusted-twice",
    "batch size and learning rate are both adjusted to N",
    result="the global batch stays as it was, and the rate is N times too high: on 8 processes 8 times, which diverges "
    "or trains badly",
    why="the batch was divided by N, so a step sees as many samples as before; the rate belongs to that number",
    mend="SGD(model.parameters(), lr=lr)  # with batch_size // world_size",
)
def adjusted_twice(program: Program) -> Iterator[Hit]:
    """A batch divided by N beside a rate multiplied by N; a rate multiplied twice."""
    divided = False
    for loader in loaders(program) if lightning(program) else training_loaders(program):
        batch = of_loader(program, loader, "batch_size")
        shared = sharding(program, loader) or prepared(program, loader)
        if batch is not None and (shared or library(program, "horovod") or lightning(program)):
            divided = divided or depends(program, batch, _by_world(ast.Div, ast.FloorDiv))
    for rate in _rates(program):
        times = depends(program, rate, _by_world(ast.Mult))
        if (divided and times and not _mentions_batch(program, rate)) or (times and _twice(program, rate)):
            yield Hit(rate, f"lr={ast.unparse(rate)}")


def _by_world(*operators: type[ast.operator]) -> Callable[[ast.AST], bool]:
    def wanted(node: ast.AST) -> bool:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, operators):
                return is_n(right) or (isinstance(op, ast.Mult) and is_n(left))
            case ast.AugAssign(op=op, value=value) if isinstance(op, operators):
                return is_n(value)
        return False

    return wanted


def is_n(node: ast.AST) -> bool:
    """The number of processes itself, through int() and the like."""
    while isinstance(node, ast.Call) and last_name(node.func) in ("int", "float", "max") and node.args:
        node = node.args[-1]
    return is_world(node)


def _mentions_batch(program: Program, node: ast.expr) -> bool:
    return depends(
        program, node, lambda each: isinstance(each, ast.Name | ast.Attribute) and "batch" in last_name(each).lower()
    )


def _twice(program: Program, rate: ast.expr) -> bool:
    """`lr * N` of a value that was multiplied by N where it was bound."""
    direct = isinstance(rate, ast.BinOp) and isinstance(rate.op, ast.Mult) and (is_n(rate.right) or is_n(rate.left))
    if not isinstance(rate, ast.BinOp) or not direct:
        return False
    rest = rate.left if is_n(rate.right) else rate.right
    return depends(program, rest, _by_world(ast.Mult)) and not _sqrt(program, rate)


def _sqrt(program: Program, rate: ast.expr) -> bool:
    return depends(program, rate, lambda each: isinstance(each, ast.Call) and last_name(each.func) == "sqrt")
