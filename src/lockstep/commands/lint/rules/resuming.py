"""Rules about resuming: whether a run that goes on is the same run."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import instance_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import lacking as lacking_in_fabric
from lockstep.commands.lint.rules.by_fabric import lost_epochs, unregistered
from lockstep.commands.lint.rules.by_ignite import lacking_in_ignite
from lockstep.commands.lint.rules.by_trainers import reloaded, trainer_not_loaded, weights_alone
from lockstep.commands.lint.rules.forgotten import never_loaded
from lockstep.commands.lint.rules.kept import written
from lockstep.commands.lint.rules.parties import named_in, roles, schedulers
from lockstep.commands.lint.rules.restored import bounds, counted_loops, epoch_loops, knows_the_file, resumes
from lockstep.commands.lint.rules.states import as_save, restored
from lockstep.commands.lint.several import comes_by, library, lightning
from lockstep.commands.lint.source import Binding
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS404",
    "state-not-saved",
    "what a resumed run needs is not in the checkpoint",
    result="a resumed run is another one: momentum starts from 0, the schedule or the epochs from the beginning",
    why="the program resumes from a file that lacks it",
    mend='torch.save({"model": ..., "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),\n'
    '            "scaler": scaler.state_dict(), "epoch": epoch}, path)',
)
def state_not_saved(program: Program) -> Iterator[Hit]:
    """A program that resumes, whose checkpoint has no optimizer, scheduler, scaler or epoch."""
    yield from lacking_in_fabric(program)
    yield from unregistered(program)
    yield from lacking_in_ignite(program)
    yield from weights_alone(program)
    states = bool(program.named.get("save_state"))
    if states or library(program, "deepspeed", "ignite") or lightning(program) or not step_loops(program):
        return
    if not resumes(program):
        return
    yield from never_loaded(program)
    kept = written(program)
    if not kept or any(text is None for _, text in kept):
        return
    told = [(call, _lacking(program, call, text or "")) for call, text in kept]
    call, lacking = min(told, key=lambda each: len(each[1]))
    lacking = [each for each in lacking if all(each in others for _, others in told)]  # a part may be a file of its own
    if lacking:
        yield Hit(call, f"without {', '.join(lacking)}")


def _lacking(program: Program, call: ast.Call, text: str) -> list[str]:
    """What a saved text does not mention of what the program has."""
    lacking = []
    if not re.search(r"optim|opt\b|\bopt_|['\"]opt", text) and not named_in(program, "optimizer", text):
        lacking.append("optimizer")
    kept = bool(re.search(r"sched", text)) or named_in(program, "scheduler", text)
    if _scheduled(program) and not _stepped_again(program) and not kept:
        lacking.append("scheduler")
    scalers = [each for each, role in roles(program).items() if role == "scaler" and isinstance(each, ast.Call)]
    enabled = any(constant(program, given(program, each, "enabled")) is not False for each in scalers)
    if enabled and not re.search(r"scaler|amp", text) and not named_in(program, "scaler", text):
        lacking.append("scaler")
    path = given(program, as_save(program, call), "f", 1)
    named = " ".join(text_of(made) for made in origins(program, path)) if path is not None else ""
    if not re.search(r"epoch|step|iter", text + named) and not any(
        knows_the_file(program, each) for each in epoch_loops(program)
    ):
        lacking.append("epoch")
    return lacking


def _scheduled(program: Program) -> bool:
    """Whether a schedule counts its own steps, and nobody tells it where it stands."""
    told = any(text.endswith(".last_epoch") for source in program.sources for text in source.attributes) or any(
        len(call.args) == 1 and "epoch" in text_of(call.args[0]) for call in program.named.get("step", [])
    )
    return not told and any(
        comes_by(program, each) and given(program, each, "last_epoch") is None for each in schedulers(program)
    )


def _stepped_again(program: Program) -> bool:
    """Whether a loop does nothing but step: a schedule brought to where the run had stopped."""
    for call in program.named.get("step", []):
        source = program.owner[call]
        outer = source.parents[source.parents[call]] if isinstance(source.parents[call], ast.Expr) else None
        if isinstance(outer, ast.For) and all(_only_steps(each) for each in outer.body):
            return True
    return False


def _only_steps(node: ast.stmt) -> bool:
    """`plan.step()`, `next(momenta)`."""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and last_name(call.func) in ("step", "next")


@rule(
    "LS407",
    "epochs-start-anew",
    "a resumed run begins at epoch 0 again",
    result="the data's order and the schedule start from the beginning: with 90 epochs and a stop after 60, 150 are "
    "trained",
    why="the loop's range does not know the epoch of the checkpoint",
    mend='start = checkpoint["epoch"] + 1\nfor epoch in range(start, epochs):',
)
def epochs_start_anew(program: Program) -> Iterator[Hit]:
    """A checkpoint with an epoch is loaded, and the loop over epochs is range(epochs)."""
    yield from _registered(program)
    yield from lost_epochs(program)
    yield from reloaded(program)
    yield from trainer_not_loaded(program)
    if not resumes(program) or lightning(program) or library(program, "ignite"):
        return
    if not any(text and re.search(r"epoch|step|iter", text) for _, text in written(program)):
        return
    for loop in counted_loops(program):
        if _skips(loop):
            continue
        if isinstance(loop, ast.While):
            if not knows_the_file(program, loop) and _from_a_constant(program, loop):
                yield Hit(loop)
            continue
        over = _counted(program, loop)
        start = over.args[0] if isinstance(over, ast.Call) and len(over.args) == 2 else None
        plain = start is not None and not _read_back(program, start)
        if knows_the_file(program, loop) and not plain:
            continue
        match over:
            case ast.Call(func=ast.Name(id="range" | "trange"), args=[_]):
                pass
            case ast.Call(func=ast.Name(id="range" | "trange"), args=[_, _]) if plain:
                pass
            case ast.Call(func=ast.Name(id="count") | ast.Attribute(attr="count"), args=[]):
                pass
            case _:
                continue
        steps = loop in step_loops(program)
        if steps or re.search("epoch", text_of(loop.target).lower()):
            yield Hit(loop)


def _from_a_constant(program: Program, loop: ast.While) -> bool:
    """Whether a loop counts its passes by a name that is a constant before it, whatever a file said."""
    for node in [each for one in bounds(loop) for each in walk(one)]:
        if not isinstance(node, ast.Name) or not re.search(r"epoch|step|iter", node.id):
            continue
        found = bindings(program, node, node.id)
        within = set(walk(loop))
        before = [each for each in found if each.node not in within]
        values = [_at(each) for each in before if each.kind == "value"]
        counts = any(each.kind == "aug" and each.node in within for each in found)
        plain = all(isinstance(each, ast.Constant) for each in values)
        if counts and values and plain and len(values) == len(before):
            return True
    return False


def _counted(program: Program, loop: ast.AST) -> ast.AST | None:
    """What a loop runs over, where that is one range, by a name or not."""
    if not isinstance(loop, ast.For):
        return None
    ranges = [each for each in origins(program, loop.iter) if isinstance(each, ast.Call)]
    if len(ranges) != 1:
        return loop.iter
    shown = last_name(ranges[0].func) in ("tqdm", "track", "progress_bar") and ranges[0].args
    return ranges[0].args[0] if shown else ranges[0]


def _registered(program: Program) -> Iterator[Hit]:
    """Accelerate brings back an object that knows the epoch, and the loop begins at a constant all the same."""
    known = [
        owner
        for call in program.named.get("register_for_checkpointing", [])
        for each in call.args
        if (owner := instance_of(program, each)) is not None and "epoch" in text_of(owner).lower()
    ]
    if not known or not program.named.get("load_state"):
        return
    for loop in {outer for around in step_loops(program).values() for outer in around}:
        match loop:
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=arguments)):
                first = arguments[0] if len(arguments) > 1 else None
                if (first is None or isinstance(first, ast.Constant)) and not _skips(loop):
                    yield Hit(loop)


def _at(binding: Binding) -> ast.AST | None:
    """A bound value, or that of its place in a tuple."""
    value = binding.value
    for place in binding.path:
        value = at(value.elts, place) if isinstance(value, ast.Tuple) else None
    return value


def _read_back(program: Program, node: ast.AST) -> bool:
    """Whether a number may come from a file, or from anything but a constant in the text."""
    if isinstance(node, ast.Constant):
        return False
    if isinstance(node, ast.Attribute) and any(
        re.search(r"setattr|__dict__|vars\(|fields\(", source.text) for source in program.sources
    ):
        return True
    if isinstance(node, ast.Attribute):
        found = [
            each
            for source in program.sources
            for text, bound in source.attributes.items()
            if text.rpartition(".")[2] == node.attr
            for each in bound
        ]
        return not found or not all(isinstance(each.value, ast.Constant) and each.kind == "value" for each in found)
    if isinstance(node, ast.Subscript):
        return not _stays(program, node)
    if not isinstance(node, ast.Name) or any(
        isinstance(each.value, ast.Subscript) for each in reaching(program, node, bindings(program, node, node.id))
    ):
        return True  # an entry of a dictionary, which a function may have filled
    made = origins(program, node)
    return not made or not all(isinstance(each, ast.Constant) for each in made)


def _stays(program: Program, node: ast.Subscript) -> bool:
    """Whether an entry is a constant where its dictionary is written out, and nothing in the program sets that key."""
    key = re.escape(text_of(node.slice))
    targets = [text for source in program.sources for text in source.attributes]
    later = any(re.search(rf"\[({key}|[A-Za-z_]\w*)\]$", text) for text in targets) or program.named.get("update")
    filled = any(made in restored(program) for made in origins(program, node.value))
    made = origins(program, node)
    return bool(made) and all(isinstance(each, ast.Constant) for each in made) and not later and not filled


def _skips(loop: ast.AST) -> bool:
    return any(
        isinstance(each, ast.If)
        and any(isinstance(one, ast.Continue) for one in each.body)
        and "epoch" in text_of(each.test)
        for each in walk(loop)
    )
