"""Rules about batch size, learning rate and schedule: which experiment N processes run."""

import ast
import re
from collections.abc import Callable, Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import option
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loops, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import is_world, on_world
from lockstep.commands.lint.roles import given, library, of_loader, optimizers, sharding, training_loaders, wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.reading import meant_for_all

_EACH = re.compile(
    r"per[ _-]?(gpu|device|process|proc|rank|worker|node|core)|(each|every|a) (gpu|device|process|rank)|micro|local"
    r"|each|_rank|每(张|个|块)|单卡"
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
        or not (wrapped(program) or library(program, "horovod"))
        or any(on_world(program, rate) for rate in rates)
    ):
        return
    if _rate_is_set(program):
        return
    for loader in training_loaders(program):
        batch = of_loader(program, loader, "batch_size")
        if batch is None or not sharding(program, loader) or on_world(program, batch):
            continue
        if not (_for_each(program, batch) or _line_says(program, batch) or meant_for_all(program, batch)):
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
    for loader in training_loaders(program):
        batch = of_loader(program, loader, "batch_size")
        if batch is not None and (sharding(program, loader) or library(program, "horovod")):
            divided = divided or depends(program, batch, _by_world(ast.Div, ast.FloorDiv))
    for rate in _rates(program):
        if _mentions_batch(program, rate):
            continue
        times = depends(program, rate, _by_world(ast.Mult))
        if (divided and times) or (times and _twice(program, rate)):
            yield Hit(rate, f"lr={ast.unparse(rate)}")


def _by_world(*operators: type[ast.operator]) -> Callable[[ast.AST], bool]:
    def wanted(node: ast.AST) -> bool:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, operators):
                return _is_n(right) or (isinstance(op, ast.Mult) and _is_n(left))
            case ast.AugAssign(op=op, value=value) if isinstance(op, operators):
                return _is_n(value)
        return False

    return wanted


def _is_n(node: ast.AST) -> bool:
    while isinstance(node, ast.Call) and last_name(node.func) in ("int", "float", "max") and node.args:
        node = node.args[-1]
    return is_world(node)


def _mentions_batch(program: Program, node: ast.expr) -> bool:
    return depends(
        program, node, lambda each: isinstance(each, ast.Name | ast.Attribute) and "batch" in last_name(each).lower()
    )


def _twice(program: Program, rate: ast.expr) -> bool:
    """`lr * N` of a value that was multiplied by N where it was bound."""
    direct = isinstance(rate, ast.BinOp) and isinstance(rate.op, ast.Mult) and (_is_n(rate.right) or _is_n(rate.left))
    if not isinstance(rate, ast.BinOp) or not direct:
        return False
    rest = rate.left if _is_n(rate.right) else rate.right
    return depends(program, rest, _by_world(ast.Mult)) and not _sqrt(program, rate)


def _sqrt(program: Program, rate: ast.expr) -> bool:
    return depends(program, rate, lambda each: isinstance(each, ast.Call) and last_name(each.func) == "sqrt")


def _schedulers(program: Program) -> list[ast.Call]:
    return [
        call
        for call in program.calls
        if ".lr_scheduler." in qualified(program, call.func)
        or re.match(r"get_\w*schedule\w*$|get_scheduler$", last_name(call.func))
    ]


@rule(
    "LS210",
    "scheduler-steps",
    "the scheduler is stepped a wrong number of times",
    result="the rate ends before the training does, or long after it: stepped N times as often, it is over after 1/N "
    "of the epochs",
    why="a schedule counts its step() calls; they have to be as many as it was made for",
    mend="scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))  # and one step() a batch",
)
def scheduler_steps(program: Program) -> Iterator[Hit]:
    """step() per batch and per epoch; per batch with a count of epochs; once a process."""
    training = step_loops(program)
    for scheduler in _schedulers(program):
        in_batch, in_epoch = [], []
        for call in program.named.get("step", []):
            owner = call.func.value if isinstance(call.func, ast.Attribute) else None
            if owner is None or scheduler not in origins(program, owner):
                continue
            for path in loops(program, call):
                if any(loop in training for loop in path):
                    in_batch.append(call)
                elif path:
                    in_epoch.append(call)
                if path and isinstance(path[0], ast.For) and _runs_over_ranks(path[0]):
                    yield Hit(call, "once for each process")
                    return
        if in_batch and in_epoch and not set(in_batch) & set(in_epoch):
            yield Hit(in_epoch[0], "after each batch and after each epoch")
        elif in_batch and _counts_epochs(program, scheduler):
            yield Hit(in_batch[0], "after each batch, made for epochs")
        elif in_epoch and not in_batch and last_name(scheduler.func) == "OneCycleLR":
            yield Hit(in_epoch[0], "OneCycleLR counts batches")
        elif in_batch and _already_shared(program, scheduler):
            yield Hit(scheduler, "prepared by Accelerate, which steps it once for each process")


def _runs_over_ranks(loop: ast.For) -> bool:
    match loop.iter:
        case ast.Call(func=ast.Name(id="range"), args=[count]):
            return _is_n(count)
    return False


def _counts_epochs(program: Program, scheduler: ast.Call) -> bool:
    """CosineAnnealingLR(T_max=epochs): by a name of epochs, in which no number of batches enters."""
    if last_name(scheduler.func) != "CosineAnnealingLR":
        return False
    count = given(program, scheduler, "T_max", 1)
    if count is None or depends(
        program, count, lambda node: isinstance(node, ast.Call) and last_name(node.func) == "len"
    ):
        return False
    if depends(program, count, lambda node: bool(re.search(r"steps|iters|batches", last_name(node).lower()))):
        return False
    return bool(re.search(r"epochs?$", last_name(count).lower()))


def _already_shared(program: Program, scheduler: ast.Call) -> bool:
    """A schedule of len(loader) steps of a loader that was prepared before, which is then prepared itself."""
    is_prepared = [
        call
        for call in program.named.get("prepare", [])
        if any(scheduler in origins(program, each) for each in call.args)
    ]
    if (
        not is_prepared
        or not library(program, "accelerate")
        or any(
            each.arg in ("split_batches", "step_scheduler_with_optimizer")
            for call in program.calls
            for each in call.keywords
        )
    ):
        return False
    before = [call for call in program.named["prepare"] if call.lineno < scheduler.lineno and call not in is_prepared]

    def counted(node: ast.AST) -> bool:
        if not (isinstance(node, ast.Call) and last_name(node.func) == "len" and node.args):
            return False
        return any(
            set(origins(program, node.args[0])) & set(origins(program, each)) for call in before for each in call.args
        )

    parts = [*scheduler.args[1:], *(each.value for each in scheduler.keywords)]
    return (
        bool(before)
        and any(depends(program, part, counted) for part in parts)
        and not any(on_world(program, part) for part in parts)
    )
