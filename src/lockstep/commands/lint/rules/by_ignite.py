"""What rules look for in Ignite's engines, which run a function or an object of the script for each batch."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.calls import definition, instance_of, method
from lockstep.commands.lint.contexts import quiet
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import constant, drops, given, sharding
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.parties import held
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk


def engine_step(program: Program, engine: ast.Call) -> Function | None:
    """The local function, or the method __call__ of a local class, that an Engine runs for each batch."""
    if not engine.args:
        return None
    found = definition(program, engine.args[0])
    if isinstance(found, Function):
        return found
    owner = instance_of(program, engine.args[0])
    return method(program, owner, "__call__") if owner is not None else None


def evaluated(program: Program) -> Iterator[tuple[ast.Call, ast.expr]]:
    """`evaluator.run(loader)`: the call, and the loader; an engine that trains is given a number of epochs."""
    for call in program.named.get("run", []) if library(program, "ignite") else []:
        if call.args and given(program, call, "max_epochs") is None and len(call.args) == 1:
            yield call, call.args[0]


def padded_by_ignite(program: Program) -> Iterator[Hit]:
    """auto_dataloader, or DistributedSampler, for an evaluator: it repeats samples until the parts are equal."""
    for _, loader in evaluated(program):
        for made in origins(program, loader):
            auto = isinstance(made, ast.Call) and last_name(made.func) == "auto_dataloader"
            if auto and isinstance(made, ast.Call) and constant(program, given(program, made, "drop_last")) is not True:
                yield Hit(made)
            parts = sharding(program, made) if isinstance(made, ast.Call) and not auto else []
            yield from (
                Hit(each)
                for each in parts
                if constant(program, given(program, each, "shuffle", 3)) is False and not drops(program, each)
            )


def never_trains(program: Program) -> Iterator[Hit]:
    """An evaluator that Ignite puts into eval(), and a training step that says train() nowhere."""
    steps = [step for call in program.named.get("Engine", []) if (step := engine_step(program, call)) is not None]
    training = [each for each in steps if any(_named(node, "backward") for node in walk(each))]
    supervised = program.named.get("create_supervised_evaluator", [])
    if not supervised or not training or program.named.get("create_supervised_trainer"):
        return
    handlers = [f for source in program.sources for f in source.functions if f.decorator_list]
    places = [*training, *handlers]
    if not any(_named(node, "train") for place in places for node in walk(place)):
        runs = [call for call, _ in evaluated(program) if not _after_training(program, call)]
        yield from (Hit(call) for call in runs[:1])


def _after_training(program: Program, call: ast.Call) -> bool:
    """Whether an evaluator runs in a handler of the training's end."""
    here = function_of(program.owner[call], call)
    events = " ".join(map(text_of, here.decorator_list)) if here is not None else ""
    return "Events.COMPLETED" in events


def _named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) == name


def lacking_in_ignite(program: Program) -> Iterator[Hit]:
    """Checkpoint's dictionary without the optimizer or the trainer, in a script that loads objects from it."""
    if not library(program, "ignite") or not program.named.get("load_objects"):
        return
    if program.named.get("setup_common_training_handlers"):
        return  # it writes what it is given as to_save
    schedules = any(".lr_scheduler." in text_of(call.func) for call in program.calls)
    kept = []
    for call in program.named.get("Checkpoint", []):
        for made in origins(program, call.args[0]) if call.args else []:
            if isinstance(made, ast.Dict):
                said = [text_of(each) for each in made.keys if each is not None]
                kept.append((call, " ".join([*said, *held(program, made)]).lower()))
    if kept:
        call, keys = max(kept, key=lambda each: len(each[1]))
        words = [("optimizer", "opt"), ("epoch", "trainer"), *([("scheduler", "sched")] if schedules else [])]
        missing = [word for word, part in words if part not in keys]
        if missing:
            yield Hit(call, f"without {', '.join(missing)}")


def training_mode(program: Program) -> Iterator[Hit]:
    """An engine's step of the script's that evaluates, without eval()."""
    for call in program.named.get("Engine", []) if library(program, "ignite") else []:
        step = engine_step(program, call)
        nodes = list(walk(step)) if step is not None else []
        trains = any(_named(each, "backward") or _named(each, "step") for each in nodes)
        if step is not None and quiet(step) and not trains and not any(_named(each, "eval") for each in nodes):
            inner = [each for each in nodes if isinstance(each, ast.With) and "no_grad" in text_of(each.items[0])]
            yield Hit(inner[0] if inner else step)


def waits(program: Program) -> Iterator[Hit]:
    """A barrier in an engine's training step."""
    for call in program.named.get("Engine", []) if library(program, "ignite") else []:
        step = engine_step(program, call)
        nodes = list(walk(step)) if step is not None else []
        if any(_named(each, "backward") for each in nodes):
            yield from (Hit(each) for each in nodes if _named(each, "barrier"))


def event_of(program: Program, node: ast.AST) -> str:
    """`batch` or `epoch`: what a handler of a training engine, or its step, runs after; nothing elsewhere."""
    if not library(program, "ignite"):
        return ""
    function = _handler(program, node)
    if function is None:
        return ""
    if any(engine_step(program, call) is function for call in program.named.get("Engine", [])):
        return "batch"
    texts = [text_of(each) for each in getattr(function, "decorator_list", [])]
    for call in program.named.get("add_event_handler", []):
        if len(call.args) > 1 and function in (call.args[1], definition(program, call.args[1])):
            texts.append(text_of(call))
    for text in texts:
        if "train" in text.partition(".")[0].lower() and "every=" not in text and "once=" not in text:
            if "Events.EPOCH_" in text:
                return "epoch"
            if "Events.ITERATION_" in text:
                return "batch"
    return ""


def _handler(program: Program, node: ast.AST) -> Function | ast.Lambda | None:
    """The function or lambda that a place stands in."""
    source = program.owner[node]
    scope = source.scopes[node]
    return scope if isinstance(scope, ast.Lambda) else function_of(source, node)
