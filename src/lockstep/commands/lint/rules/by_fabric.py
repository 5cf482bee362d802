"""What rules look for in scripts whose loops Fabric or Accelerate wrap: prepared models, loaders and states."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.flow import is_reduced
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import calls_in, inside, step_loops
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import constant, given, library
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.source import Loop, function_of


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
    if not managed(program):
        return
    for new, old, call in _bound(program, "prepare", "setup", "setup_module", "prepare_model"):
        if not isinstance(old, ast.Name) or ast.unparse(new) == ast.unparse(old):
            continue
        for loop in step_loops(program):
            for node in inside(program, loop):
                same = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == old.id
                if same and function_of(program.owner[node], node) is function_of(program.owner[call], call):
                    yield Hit(node)
    for loop in step_loops(program):
        for node in inside(program, loop):
            owner = node.func if isinstance(node, ast.Call) else None
            past = isinstance(owner, ast.Call) and last_name(owner.func) == "unwrap_model"
            if past or (isinstance(owner, ast.Attribute) and owner.attr == "module" and isinstance(node, ast.Call)):
                yield Hit(node)


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
        if program.named.get("Fabric") and "fabric" in ast.unparse(call.func) and len(call.args) > 1
    ]
    if not fabric and (not loaded or kept):
        return
    for loop in {outer for around in step_loops(program).values() for outer in around}:
        match loop:
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=arguments)):
                first = arguments[0] if len(arguments) > 1 else None
                skips = any(isinstance(each, ast.Continue | ast.Break) for each in ast.walk(loop))
                rest = re.search(r" - |remain|left|start|first|resume", ast.unparse(loop.iter))
                if (first is None or isinstance(first, ast.Constant)) and not skips and not rest:
                    yield Hit(loop)


def lacking(program: Program) -> Iterator[Hit]:
    """fabric.save of a dictionary without the optimizer or the epoch, in a script that goes on from it."""
    if not any("fabric" in ast.unparse(call.func) for call in program.named.get("load", [])):
        return
    kept = list[tuple[ast.Call, str]]()
    for call in program.named.get("save", []):
        state = given(program, call, "state", 1)
        if "fabric" not in ast.unparse(call.func) or state is None or not program.named.get("Fabric"):
            continue
        for made in origins(program, state):
            if not isinstance(made, ast.Dict) or None in made.keys:
                continue
            kept.append((call, " ".join(ast.unparse(each) for each in made.keys if each is not None).lower()))
    if kept:
        call, keys = max(kept, key=lambda each: len(each[1]))  # the others may be weights to keep
        missing = [word for word, part in (("optimizer", "opt"), ("epoch", "epoch")) if part not in keys]
        if "epoch" in missing and ("step" in keys or "iter" in keys):
            missing.remove("epoch")
        if any(".lr_scheduler." in ast.unparse(one.func) for one in program.calls) and "sched" not in keys:
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
        if ".lr_scheduler." in ast.unparse(scheduler.func) and scheduler not in handed:
            yield from (Hit(call, "without scheduler") for call in program.named.get("save_state", [])[:1])
            return
