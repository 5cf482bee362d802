"""What rules look for in scripts whose loops Fabric or Accelerate wrap: prepared models, loaders and states."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import calls_in, inside, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.reduced import is_reduced
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.parties import held
from lockstep.commands.lint.rules.windows import passes
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import text_of, walk


def managed(program: Program) -> bool:
    """Whether Fabric or Accelerate is set up."""
    return bool(program.named.get("Fabric") or program.named.get("Accelerator"))


def _bound(program: Program, *names: str) -> Iterator[tuple[ast.expr, ast.expr, ast.Call]]:
    """`x = fabric.setup(y)`, and each pair of a tuple: x, y and the call."""
    for name in names:
        for call in program.named.get(name, []):
            parent = program.owner[call].parents[call]
            if not isinstance(parent, ast.Assign) or not isinstance(call.func, ast.Attribute):
                continue
            target = parent.targets[0]
            left = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from ((one, other, call) for one, other in zip(left, call.args, strict=False))


def unwrapped_calls(program: Program) -> Iterator[Hit]:
    """The model that was given to prepare() or setup(), called in a step loop beside the one that came back."""
    given = [each for each in _bound(program, "auto_model") if qualified(program, each[2].func).startswith("ignite.")]
    if not managed(program) and not given:
        return
    given += _bound(program, "prepare", "setup", "setup_module", "prepare_model") if managed(program) else []
    nodes = [node for one in passes(program) for node in inside(program, one) if isinstance(node, ast.Call)]
    for new, old, _ in given:
        if isinstance(old, ast.Name | ast.Attribute) and text_of(new) != text_of(old):
            yield from (Hit(node) for node in nodes if _same_object(program, node.func, old))
    kept = {made for _, _, call in given for part in call.args[:1] for made in origins(program, part)}
    for node in nodes:
        inner = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "module" else None
        ours = inner is not None and (managed(program) or bool(kept & set(origins(program, inner))))
        if ours or (managed(program) and _is_unwrapped(program, node.func)):
            yield Hit(node)


def _same_object(program: Program, one: ast.expr, other: ast.expr) -> bool:
    """Whether two names are one, bound once, or two attributes of one class's objects."""
    source = program.owner[one]
    if text_of(one) != text_of(other) or source is not program.owner[other]:
        return False
    if isinstance(one, ast.Name):
        found = bindings(program, one, one.id)
        return len(found) == 1 and found == bindings(program, other, one.id)
    owned = isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
    bound = source.attributes.get(text_of(one), [])
    return owned and len(bound) == 1 and class_of(source, one) is class_of(source, other)


def _is_unwrapped(program: Program, model: ast.expr) -> bool:
    """`accelerator.unwrap_model(model)`, or a name of what it returned."""
    known = reaching(program, model, bindings(program, model, model.id)) if isinstance(model, ast.Name) else []
    values = [each.value if each.kind == "value" else None for each in known] or [model]
    return all(isinstance(each, ast.Call) and last_name(each.func) == "unwrap_model" for each in values)


def padded_by_prepare(program: Program, loader: ast.Call, loops: list[Loop]) -> Iterator[Hit]:
    """A loader that prepare() or setup_dataloaders() pads, whose sums are reduced as they are."""
    whole = any(
        constant(program, given(program, call, "use_distributed_sampler")) is False
        for call in program.named.get("setup_dataloaders", [])
    )
    if whole or not managed(program):
        return
    cut = any(calls_in(program, loop, "gather_for_metrics", "gather") for loop in loops)
    if not cut and all(is_reduced(program, loop) for loop in loops):
        yield Hit(loader, "parts made equal by repeated samples")


def seeded_before_loaders(program: Program) -> Iterator[Hit]:
    """seed_everything of the rank above setup_dataloaders, or above a Trainer: their samplers take that seed."""
    for call in program.named.get("seed_everything", []):
        if not (library(program, "lightning", "pytorch_lightning", "lightning_fabric") and call.args):
            continue
        home, function = program.owner[call], function_of(program.owner[call], call)
        if not on_rank(program, call.args[0]):
            continue
        for name in ("setup_dataloaders", "fit"):
            for later in program.named.get(name, []):
                same = program.owner[later] is home and function_of(home, later) is function
                own = constant(program, given(program, later, "use_distributed_sampler")) is False
                if same and not own and later.lineno > call.lineno and _shuffles(program, later):
                    yield Hit(call, "the loaders' own samplers take it, so each rank has another order")
                    return


def _shuffles(program: Program, call: ast.Call) -> bool:
    """Whether a loader among a call's arguments shuffles by itself; a Trainer's data module may."""
    own = any(
        constant(program, given(program, each, "use_distributed_sampler")) is False
        for each in program.named.get("Trainer", [])
    )
    if last_name(call.func) == "fit":
        known = program.named.get("DataLoader", [])
        return not own and any(constant(program, given(program, each, "shuffle", 2)) is True for each in known)
    made = [one for each in call.args for one in origins(program, each) if isinstance(one, ast.Call)]
    return any(constant(program, given(program, each, "shuffle", 2)) is True for each in made)


def lost_epochs(program: Program) -> Iterator[Hit]:
    """load_state, or fabric.load, in a script whose loop over epochs begins at a constant all the same."""
    loaded = program.named.get("load_state", []) if program.named.get("Accelerator") else []
    kept = any(program.named.get(name) for name in ("register_for_checkpointing", "skip_first_batches"))
    fabric = [
        call
        for call in program.named.get("load", [])
        if program.named.get("Fabric") and "fabric" in text_of(call.func) and len(call.args) > 1
    ]
    if not fabric and (not loaded or kept):
        return
    for loop in {outer for around in step_loops(program).values() for outer in around}:
        match loop:
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=arguments)):
                first = arguments[0] if len(arguments) > 1 else None
                skips = any(isinstance(each, ast.Continue | ast.Break) for each in walk(loop))
                rest = re.search(r" - |remain|left|start|first|resume", text_of(loop.iter)) or _lessened(program, loop)
                if (first is None or isinstance(first, ast.Constant)) and not skips and not rest:
                    yield Hit(loop)


def _lessened(program: Program, loop: ast.For) -> bool:
    """Whether a name in a loop's range is made smaller on the way: `epochs -= done`."""
    names = [each for each in walk(loop.iter) if isinstance(each, ast.Name)]
    return any(binding.kind == "aug" for each in names for binding in bindings(program, each, each.id))


def lacking(program: Program) -> Iterator[Hit]:
    """fabric.save of a dictionary without the optimizer or the epoch, in a script that goes on from it."""
    if not any("fabric" in text_of(call.func) for call in program.named.get("load", [])):
        return
    kept = list[tuple[ast.Call, str]]()
    for call in program.named.get("save", []):
        state = given(program, call, "state", 1)
        if "fabric" not in text_of(call.func) or state is None or not program.named.get("Fabric"):
            continue
        for made in origins(program, state):
            if not isinstance(made, ast.Dict) or None in made.keys:
                continue
            keys = [text_of(each) for each in made.keys if each is not None]
            later = [one for one in program.named.get("update", []) if text_of(one.func) == f"{text_of(state)}.update"]
            kept.append((call, " ".join([*keys, *held(program, made), *map(text_of, later)]).lower()))
    if kept:
        call, said = max(kept, key=lambda each: len(each[1]))  # the others may be weights to keep
        missing = [word for word, part in (("optimizer", "opt"), ("epoch", "epoch")) if part not in said]
        if "epoch" in missing and ("step" in said or "iter" in said):
            missing.remove("epoch")
        if any(".lr_scheduler." in text_of(one.func) for one in program.calls) and "sched" not in said:
            missing.append("scheduler")
        if missing:
            yield Hit(call, f"without {', '.join(missing)}")


def unregistered(program: Program) -> Iterator[Hit]:
    """Accelerate's save_state of a script whose scheduler was never prepared, nor registered."""
    if not (program.named.get("Accelerator") and program.named.get("load_state")):
        return
    handed = [
        made
        for name in ("prepare", "prepare_scheduler", "register_for_checkpointing")
        for call in program.named.get(name, [])
        for each in call.args
        for made in origins(program, each)
    ]
    for scheduler in program.calls:
        if ".lr_scheduler." in text_of(scheduler.func) and scheduler not in handed:
            yield from (Hit(call, "without scheduler") for call in program.named.get("save_state", [])[:1])
            return
