"""Rules about files that are read back."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition, sites
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import guard, guarded, on_rank
from lockstep.commands.lint.roles import constant, distributed, given
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.saving import loads, saves
from lockstep.commands.lint.source import Function, above, function_of, statement_of


@rule(
    "LS402",
    "load-without-map-location",
    "a checkpoint is loaded without map_location",
    result="each rank loads rank 0's tensors onto GPU 0: N times the memory there, and out of memory on large models",
    why="torch.load puts tensors on the device that they were saved from",
    mend='torch.load(path, map_location="cpu", weights_only=True)',
)
def load_without_map_location(program: Program) -> Iterator[Hit]:
    """torch.load without map_location in a program of several processes, or one that runs with and without a GPU."""
    gpu = any(re.search(r"cuda|device", source.text) for source in program.sources)
    for call in loads(program):
        if distributed(program) and gpu and given(program, call, "map_location", 1) is None and not _spreads(call):
            if any(_other_branch(program, call, each) for each in loads(program)):
                continue  # the way of a single device, beside that of several
            if guarded(program, call) or _no_checkpoint(program, call):
                continue
            yield Hit(call, "", _keyword(call, 'map_location="cpu"'))


def _other_branch(program: Program, call: ast.Call, other: ast.Call) -> bool:
    """Whether the same file is loaded elsewhere in the function, onto a named device."""
    same = bool(call.args and other.args) and ast.dump(call.args[0]) == ast.dump(other.args[0])
    return same and other in own_nodes(program, call) and given(program, other, "map_location", 1) is not None


def _no_checkpoint(program: Program, call: ast.Call) -> bool:
    """Whether a file holds a rank's own tensors, data that were prepared, or what was brought to the CPU before."""
    path = given(program, call, "f", 0)
    function = function_of(program.owner[call], call)
    of_network = function is not None and function.name == "__init__"  # pretrained weights, as they were published
    if path is None or on_rank(program, path) or _of_data(program, call):
        return True
    if of_network or "pretrain" in ast.unparse(path).lower():
        return True
    texts = {each.value for each in ast.walk(path) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return any(
        ".cpu()" in ast.unparse(save.args[0])
        and any(isinstance(each, ast.Constant) and each.value in texts for each in ast.walk(save))
        for save in saves(program)
        if save.args
    )


def _of_data(program: Program, call: ast.Call) -> bool:
    """Whether a file holds data that were prepared, by its name or by that of what is read."""
    path, target = given(program, call, "f", 0), statement_of(program.owner[call], call)
    names = ast.unparse(target.targets[0]) if isinstance(target, ast.Assign) else ""
    names += ast.unparse(path) if path is not None else ""
    return bool(re.search(r"dataset|cache|feature|label|vocab", names.lower()))


def _of_checkpoint(program: Program, call: ast.Call) -> bool:
    """Whether what pickle reads is a network's state: by names around, or because it is loaded into one."""
    source = program.owner[call]
    near: list[ast.AST] = [statement_of(source, call)]
    near += [item for each in above(source, call) if isinstance(each, ast.With) for item in each.items]
    text = " ".join(map(ast.unparse, near)).lower()
    used = any(call in _origins_of_parts(program, each) for each in program.named.get("load_state_dict", []))
    return used or bool(re.search(r"checkpoint|ckpt|snapshot|weights|state|model", text))


def _origins_of_parts(program: Program, call: ast.Call) -> list[ast.AST]:
    """Where the arguments of a call come from, an entry standing for the whole."""
    found = []
    for each in call.args:
        while isinstance(each, ast.Subscript):
            each = each.value
        found += origins(program, each)
    return found


def _spreads(call: ast.Call) -> bool:
    return any(each.arg is None for each in call.keywords)


def _keyword(call: ast.Call, text: str) -> tuple[Edit, ...]:
    """A keyword after a call's last argument."""
    parts = [*call.args, *(each.value for each in call.keywords)]
    last = max(parts, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0), default=None)
    if last is None or last.end_lineno is None or last.end_col_offset is None or isinstance(last, ast.GeneratorExp):
        return ()
    return (insert(last.end_lineno, last.end_col_offset, f", {text}"),)


@rule(
    "LS405",
    "pickle-load",
    "a file is unpickled with weights_only=False",
    result="a checkpoint from elsewhere can run any code as it is loaded",
    why="weights_only=False lets pickle call what the file names",
    mend='torch.load(path, map_location="cpu", weights_only=True)',
)
def pickle_load(program: Program) -> Iterator[Hit]:
    """torch.load with weights_only=False, of what is no data set's cache; pickle itself, of a checkpoint.

    Without the argument torch has unpickled weights alone since 2.6, and before 1.13 there was none.
    """
    for name in ("load", "loads"):
        for call in program.named.get(name, []):
            pickles = qualified(program, call.func) in (f"pickle.{name}", f"dill.{name}", f"cloudpickle.{name}")
            if pickles and _of_checkpoint(program, call):
                yield Hit(call, qualified(program, call.func))
    for call in loads(program):
        value = given(program, call, "weights_only")
        if value is not None and constant(program, value) is False and not _of_data(program, call):
            yield Hit(call)


@rule(
    "LS406",
    "no-barrier-before-load",
    "nothing lets the ranks wait between saving and loading",
    result="ranks read a file that rank 0 has not finished, or not begun: an error, or the weights of an earlier run",
    why="rank 0 writes while the others go on to the line that reads",
    mend="if rank == 0:\n    torch.save(state, path)\ndist.barrier()\nstate = torch.load(path)",
)
def no_barrier_before_load(program: Program) -> Iterator[Hit]:
    """torch.load of a path that one rank has just written in the same function, with no collective between."""
    if not distributed(program):
        return
    yield from _by_functions(program)
    for save in saves(program):
        path = given(program, save, "f", 1)
        if path is None or guard(program, save) is None:
            continue
        nodes = own_nodes(program, save)
        for load in loads(program):
            other = given(program, load, "f", 0)
            if load not in nodes or load.lineno < save.lineno or other is None or guarded(program, load):
                continue
            if (
                ast.dump(path) == ast.dump(other) or set(_texts(program, path)) & set(_texts(program, other))
            ) and not any(
                isinstance(each, ast.Call) and save.lineno < each.lineno < load.lineno and _waits(program, each)
                for each in nodes
            ):
                yield Hit(load)


def _by_functions(program: Program) -> Iterator[Hit]:
    """A call of a function that saves on one rank, then of one that loads the same path, and no wait between."""
    writers = {function for call in saves(program) if guarded(program, call) and (function := _home(program, call))}
    readers = {function for call in loads(program) if not guarded(program, call) and (function := _home(program, call))}
    for reader in readers - writers:
        for later in sites(program, reader):
            nodes = [each for each in own_nodes(program, later.call) if isinstance(each, ast.Call)]
            for earlier in nodes:
                between = [each for each in nodes if earlier.lineno < each.lineno < later.call.lineno]
                wrote = callee(program, earlier) in writers and earlier.lineno < later.call.lineno
                same = {ast.dump(each) for each in earlier.args} & {ast.dump(each) for each in later.call.args}
                path = any("path" in text or "file" in text or "Constant" in text for text in same)
                if wrote and path and not any(_waits(program, each) for each in [earlier, *between, later.call]):
                    yield Hit(later.call)


def _home(program: Program, call: ast.Call) -> Function | None:
    return function_of(program.owner[call], call)


def _texts(program: Program, node: ast.AST) -> list[str]:
    return [ast.unparse(each) for each in origins(program, node) if not isinstance(each, ast.Name)]


def _waits(program: Program, call: ast.Call) -> bool:
    names = r"barrier|all_reduce|broadcast|wait_for_everyone|all_gather|synchronize|sync"
    function = definition(program, call.func)
    inner = isinstance(function, Function) and any(
        isinstance(each, ast.Call) and re.search(names, last_name(each.func)) for each in ast.walk(function)
    )
    return bool(re.search(names, last_name(call.func))) or inner
