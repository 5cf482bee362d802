"""Rules about resuming: whether a run that goes on is the same run."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import instance_of, sites
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.roles import constant, given, library, lightning
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import lacking as lacking_in_fabric
from lockstep.commands.lint.rules.by_fabric import lost_epochs, unregistered
from lockstep.commands.lint.rules.by_ignite import lacking_in_ignite
from lockstep.commands.lint.rules.saving import in_memory, loads, saves
from lockstep.commands.lint.source import above, function_of, parameters


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
    states = bool(program.named.get("save_state"))
    if states or library(program, "deepspeed", "ignite") or lightning(program) or not step_loops(program):
        return
    if not _resumes(program):
        return
    written = [(call, _saved_text(program, call)) for call in _writers(program) if not in_memory(program, call)]
    if not written or any(text is None for _, text in written):
        return
    told = [(call, _lacking(program, call, text or "")) for call, text in written]
    call, lacking = min(told, key=lambda each: len(each[1]))
    if lacking:
        yield Hit(call, f"without {', '.join(lacking)}")


def _lacking(program: Program, call: ast.Call, text: str) -> list[str]:
    """What a saved text does not mention of what the program has."""
    lacking = []
    if not re.search(r"optim|opt\b|\bopt_|['\"]opt", text):
        lacking.append("optimizer")
    scheduled = any(".lr_scheduler." in qualified(program, each.func) for each in program.calls)
    if scheduled and not _stepped_again(program) and not re.search(r"sched", text):
        lacking.append("scheduler")
    scalers = [*program.named.get("GradScaler", []), *program.named.get("NativeScaler", [])]
    enabled = any(constant(program, given(program, each, "enabled")) is not False for each in scalers)
    if enabled and not re.search(r"scaler|amp", text):
        lacking.append("scaler")
    path = given(program, call, "f", 1)
    named = " ".join(ast.unparse(made) for made in origins(program, path)) if path is not None else ""
    if not re.search(r"epoch|step|iter", text + named):
        lacking.append("epoch")
    return lacking


def _stepped_again(program: Program) -> bool:
    """Whether a loop does nothing but step: a schedule brought to where the run had stopped."""
    for call in program.named.get("step", []):
        source = program.owner[call]
        outer = source.parents[source.parents[call]] if isinstance(source.parents[call], ast.Expr) else None
        if isinstance(outer, ast.For) and len(outer.body) == 1:
            return True
    return False


def _writers(program: Program) -> list[ast.Call]:
    """The calls that write a checkpoint: torch.save's, and in place of a local wrapper's own those of the wrapper."""
    found = []
    for call in saves(program):
        function = function_of(program.owner[call], call)
        names = [each.arg for each in parameters(function)] if function is not None else []
        first = call.args[0] if call.args else None
        handed = isinstance(first, ast.Starred) or (isinstance(first, ast.Name) and first.id == next(iter(names), ""))
        known = [site.call for site in sites(program, function) if site.call.args] if function is not None else []
        found += known if handed and known else [call]
    return found


def _saved_text(program: Program, call: ast.Call) -> str | None:
    """What a torch.save writes, as text; None where that can't be told."""
    if not call.args or isinstance(call.args[0], ast.Starred):
        return None
    parts = [ast.unparse(call.args[0])]
    for made in origins(program, call.args[0]):
        if isinstance(made, ast.arg):
            return None
        parts.append(ast.unparse(made))
        if isinstance(made, ast.Dict) and None in made.keys:
            return None  # another dictionary is spread into it
        if isinstance(made, ast.Call) and last_name(made.func) not in ("state_dict", "dict"):
            return None
    if isinstance(call.args[0], ast.Name):
        source = program.owner[call]
        parts += [
            f"{text} = {ast.unparse(b.value)}"
            for text, bs in source.attributes.items()
            if text.startswith(f"{call.args[0].id}[")
            for b in bs
            if b.value is not None
        ]
        for update in program.named.get("update", []):
            if ast.unparse(update.func).startswith(f"{call.args[0].id}."):
                parts.append(ast.unparse(update))
    return "\n".join(parts)


def _resumes(program: Program) -> bool:
    """Whether weights are loaded from a file to train on: by a name that says so."""
    for call in program.named.get("load_state_dict", []):
        read = [made for arg in call.args for made in _files(program, arg) if made in loads(program)]
        if read and not all(_handed_over(program, each) for each in read):
            source = program.owner[call]
            near = " ".join(ast.unparse(each.test) for each in above(source, call) if isinstance(each, ast.If))
            function = function_of(source, call)
            near += function.name if function else ""
            near += " ".join(ast.unparse(made) for arg in call.args for made in _files(program, arg))
            if re.search(r"resume|checkpoint|ckpt|snapshot|restart|continue|last", near.lower()):
                return True
            files = [made for arg in call.args for made in _files(program, arg) if isinstance(made, ast.Call)]
            if any(_own_file(program, made) and _before_training(program, made) for made in files):
                return True
    return False


def _own_file(program: Program, load: ast.Call) -> bool:
    """Whether a file is read that the program writes."""
    path = given(program, load, "f", 0)
    mine = {ast.dump(each) for each in origins(program, path)} if path is not None else set()
    written = [each for save in saves(program) if (each := given(program, save, "f", 1)) is not None]
    return any(mine & {ast.dump(one) for one in origins(program, each)} for each in written)


def _before_training(program: Program, load: ast.Call) -> bool:
    """Whether a file is read above the loops over epochs, in their function, or by a function called there."""
    outer = [loop for around in step_loops(program).values() for loop in around]
    function = function_of(program.owner[load], load)
    places = [load, *([site.call for site in sites(program, function)] if function is not None else [])]
    return any(
        program.owner[place] is program.owner[loop]
        and function_of(program.owner[place], place) is function_of(program.owner[loop], loop)
        and place.lineno <= loop.lineno
        for place in places
        for loop in outer
    )


def _handed_over(program: Program, load: ast.AST) -> bool:
    """Whether a file is read that its function has just written: rank 0's first weights, for the other ranks."""
    assert isinstance(load, ast.Call)
    path = given(program, load, "f", 0)
    mine = function_of(program.owner[load], load)
    for call in saves(program):
        other = given(program, call, "f", 1)
        here = function_of(program.owner[call], call) is mine and call.lineno < load.lineno
        if here and path is not None and other is not None and ast.dump(path) == ast.dump(other):
            return True
    return False


def _files(program: Program, node: ast.AST) -> list[ast.AST]:
    """The origins of a value, or of what it is an entry of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call) and last_name(node.func) == "get" and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return origins(program, node)


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
    if not _resumes(program) or lightning(program) or library(program, "ignite"):
        return
    saved = [_saved_text(program, call) for call in _writers(program)]
    if not any(text and re.search(r"epoch", text) for text in saved):
        return
    for loop in {outer for around in step_loops(program).values() for outer in around}:
        match _counted(program, loop):
            case ast.Call(func=ast.Name(id="range"), args=[_]):
                pass
            case ast.Call(func=ast.Name(id="range"), args=[start, _]) if isinstance(start, ast.Constant):
                pass
            case ast.Call(func=ast.Name(id="range"), args=[start, _]) if not _read_back(program, start):
                pass
            case _:
                continue
        if not _skips(loop) and (not isinstance(loop, ast.For) or re.search("epoch", ast.unparse(loop.target).lower())):
            yield Hit(loop)


def _counted(program: Program, loop: ast.AST) -> ast.AST | None:
    """What a loop runs over, where that is one range, by a name or not."""
    if not isinstance(loop, ast.For):
        return None
    ranges = [each for each in origins(program, loop.iter) if isinstance(each, ast.Call)]
    return ranges[0] if len(ranges) == 1 else loop.iter


def _registered(program: Program) -> Iterator[Hit]:
    """Accelerate brings back an object that knows the epoch, and the loop begins at a constant all the same."""
    known = [
        owner
        for call in program.named.get("register_for_checkpointing", [])
        for each in call.args
        if (owner := instance_of(program, each)) is not None and "epoch" in ast.unparse(owner).lower()
    ]
    if not known or not program.named.get("load_state"):
        return
    for loop in {outer for around in step_loops(program).values() for outer in around}:
        match loop:
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=arguments)):
                first = arguments[0] if len(arguments) > 1 else None
                if (first is None or isinstance(first, ast.Constant)) and not _skips(loop):
                    yield Hit(loop)


def _read_back(program: Program, node: ast.AST) -> bool:
    """Whether a number may come from a file, or from anything but a constant in the text."""
    if not isinstance(node, ast.Name) or any(
        isinstance(each.value, ast.Subscript) for each in bindings(program, node, node.id)
    ):
        return True  # an entry of a dictionary, which a function may have filled
    made = origins(program, node)
    return not made or not all(isinstance(each, ast.Constant) for each in made)


def _skips(loop: ast.AST) -> bool:
    return any(
        isinstance(each, ast.If)
        and any(isinstance(one, ast.Continue) for one in each.body)
        and "epoch" in ast.unparse(each.test)
        for each in ast.walk(loop)
    )
