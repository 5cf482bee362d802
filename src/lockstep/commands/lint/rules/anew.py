"""The rule about a resumed run's first epoch: whether the loop over epochs knows the file."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, instance_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.parts import Part, attribute_bindings, members
from lockstep.commands.lint.pieces import at
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import lost_epochs
from lockstep.commands.lint.rules.by_trainers import reloaded, trainer_not_loaded
from lockstep.commands.lint.rules.kept import written
from lockstep.commands.lint.rules.restored import bounds, counted_loops, knows_the_file, resumes
from lockstep.commands.lint.rules.states import restored
from lockstep.commands.lint.several import library, lightning
from lockstep.commands.lint.source import Binding
from lockstep.commands.lint.tree import text_of, walk


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
        plain = start is not None and not _read_back(program, start, loop)
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
        if loop in step_loops(program) or _of_epochs(loop):
            yield Hit(loop)


def _of_epochs(loop: ast.For | ast.AsyncFor) -> bool:
    """Whether a loop counts epochs, by what it calls them or by its bounds: not folds, or trials."""
    return bool(re.search(r"epoch|^ep?$", text_of(loop.target).lower()) or "epoch" in text_of(loop.iter).lower())


def _from_a_constant(program: Program, loop: ast.While) -> bool:
    """Whether a loop counts its passes by a name or an attribute that is a constant before it, whatever a file said."""
    for node in [each for one in bounds(loop) for each in walk(one)]:
        if isinstance(node, ast.Attribute) and re.search(r"epoch|step|iter", node.attr):
            counts = any(each.kind == "aug" or _in(loop, each) for each in attribute_bindings(program, node.attr))
            if counts and _set_to_constants(program, node, loop):
                return True
        if not isinstance(node, ast.Name) or not re.search(r"epoch|step|iter", node.id):
            continue
        found = bindings(program, node, node.id)
        before = [each for each in found if not _in(loop, each)]
        values = [_at(each) for each in before if each.kind == "value"]
        counts = any(each.kind == "aug" and _in(loop, each) for each in found)
        plain = all(isinstance(each, ast.Constant) for each in values)
        if counts and values and plain and len(values) == len(before):
            return True
    return False


def _in(loop: ast.AST, binding: Binding) -> bool:
    return binding.node in set(walk(loop))


def _set_to_constants(program: Program, node: ast.Attribute, loop: ast.AST) -> bool:
    """Whether an attribute begins as a constant, and nothing outside a loop sets it to anything else."""
    if any(re.search(r"setattr|__dict__|vars\(|fields\(", source.text) for source in program.sources):
        return False
    known = [each for each in attribute_bindings(program, node.attr) if not _in(loop, each)]
    counted = [each for each in known if each.kind == "aug" and isinstance(each.value, ast.Constant)]
    begun = _begun(program, node)
    if begun is None and len(counted) == len(known):
        return False
    values = [_at(each) if each.kind == "value" else None for each in known if each not in counted]
    values += [value if not path else None for value, path in begun or ()]
    return bool(values) and all(isinstance(each, ast.Constant) for each in values)


def _begun(program: Program, node: ast.Attribute) -> list[Part] | None:
    """What an attribute is where its objects are made; None where one of them can't be told: `Run(**state)`."""
    own, found = instance_of(program, node.value), list[Part]()
    for made in origins(program, node.value):
        kind = definition(program, made.func) if isinstance(made, ast.Call) else own
        spread = isinstance(made, ast.Call) and any(each.arg is None for each in made.keywords)
        if not isinstance(kind, ast.ClassDef) or not isinstance(made, ast.Call | ast.arg) or spread:
            return None
        found += members(program, made if isinstance(made, ast.Call) else kind, node.attr)
    return found


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


def _read_back(program: Program, node: ast.AST, loop: ast.AST) -> bool:
    """Whether a number may come from a file, or from anything but a constant in the text."""
    if isinstance(node, ast.Constant):
        return False
    if isinstance(node, ast.Attribute):
        return not _set_to_constants(program, node, loop)
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
    """Whether passes that were done are left out: `if epoch < start: continue`."""
    target = getattr(loop, "target", None)
    counts = {each.id for each in walk(target) if isinstance(each, ast.Name)} if target is not None else set()
    return any(
        isinstance(each, ast.If)
        and any(isinstance(one, ast.Continue) for one in each.body)
        and ("epoch" in text_of(each.test) or any(getattr(one, "id", "") in counts for one in walk(each.test)))
        for each in walk(loop)
    )
