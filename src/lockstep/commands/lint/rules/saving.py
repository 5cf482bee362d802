"""Rules about checkpoints: who writes, what is in them, what is read back."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lockstep.commands.lint.calls import callee, definition, sites
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.ranks import guard, guarded, on_rank, per_rank
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.roles import constant, distributed, given, library, lightning, wrapped, wraps
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.source import Function, above, function_of


def saves(program: Program) -> list[ast.Call]:
    """The calls of torch.save."""
    return [call for call in program.named.get("save", []) if qualified(program, call.func) == "torch.save"]


def loads(program: Program) -> list[ast.Call]:
    """The calls of torch.load."""
    return [call for call in program.named.get("load", []) if qualified(program, call.func) == "torch.load"]


@rule(
    "LS401",
    "saved-on-every-rank",
    "every rank writes the same file",
    result="N processes write into one file at once: now and then a checkpoint that can't be read",
    why="torch.save runs on each rank, under one name",
    mend="if rank == 0:\n    torch.save(state, path)",
)
def saved_on_every_rank(program: Program) -> Iterator[Hit]:
    """torch.save in what each rank runs, with no rank in its condition or in the file's name."""
    if not (
        wrapped(program) or program.named.get("init_process_group") or library(program, "horovod", "accelerate")
    ) or lightning(program):
        return
    for call in saves(program):
        path = given(program, call, "f", 1)
        named = path is not None and on_rank(program, path)
        if (
            not named
            and not guarded(program, call)
            and per_rank(program, call)
            and _reached(program, call)
            and not _master_saves(program, call)
        ):
            yield Hit(call)


def _reached(program: Program, call: ast.Call) -> bool:
    """Whether somebody in the program calls the function that a call stands in."""
    function = function_of(program.owner[call], call)
    return function is None or bool(sites(program, function)) or function.name in ("main", "train", "run")


def _master_saves(program: Program, call: ast.Call) -> bool:
    """Whether the function is a wrapper that asks for the rank by an argument (`is_main`, `should_save`)."""
    for outer in above(program.owner[call], call):
        if isinstance(outer, ast.If) and re.search(
            r"rank|main|master|primary|save_on|chief|zero", ast.unparse(outer.test).lower()
        ):
            return True
    return False


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
            yield Hit(call, "", _keyword(call, 'map_location="cpu"'))


def _other_branch(program: Program, call: ast.Call, other: ast.Call) -> bool:
    """Whether the same file is loaded elsewhere in the function, onto a named device."""
    same = bool(call.args and other.args) and ast.dump(call.args[0]) == ast.dump(other.args[0])
    return same and other in own_nodes(program, call) and given(program, other, "map_location", 1) is not None


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
    "LS403",
    "module-saved",
    "the wrapper's state is saved, whose keys all begin with `module.`",
    result="the file loads into no plain model: missing keys, or, with strict=False, not one weight and no error",
    why="DDP's state_dict() names its model module",
    mend="torch.save(model.module.state_dict(), path)",
)
def module_saved(program: Program) -> Iterator[Hit]:
    """state_dict() of what DistributedDataParallel returned, within torch.save."""
    if any(
        re.search(r"['\"]module\.['\"]|consume_prefix|removeprefix|clean_state_dict", source.text)
        for source in program.sources
    ):
        return
    back = _loaded_wrapped(program)
    for call in saves(program):
        whole = call.args[0] if call.args else None
        if isinstance(whole, ast.Name | ast.Attribute) and _surely_wrapped(program, whole):
            yield Hit(call)
        for node in _saved_calls(program, call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            if (
                owner is not None
                and last_name(node.func) == "state_dict"
                and _surely_wrapped(program, owner)
                and not back
            ):
                name = owner if isinstance(owner, ast.Name | ast.Attribute) else None
                edits = (insert(name.end_lineno or 0, name.end_col_offset or 0, ".module"),) if name is not None else ()
                yield Hit(node, "", edits if len(_names_in_saves(program, node)) == 1 else ())


def _names_in_saves(program: Program, node: ast.Call) -> list[ast.Call]:
    return [node for call in saves(program) if node in set(ast.walk(call))] or [node]


def _surely_wrapped(program: Program, node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        found = reaching(program, node, bindings(program, node, node.id))
        values = [each.value for each in found]
        if values and all(isinstance(each, ast.Call) and _is_prepare(each) for each in values):
            return True
    made = [each for each in origins(program, node) if not isinstance(each, ast.Constant)]
    return bool(made) and len(wraps(program, node)) == len(made)


def _before_wrapping(program: Program, call: ast.Call, owner: ast.expr) -> bool:
    """Whether the function of a call is started above the line that wraps, in that line's function."""
    function = function_of(program.owner[call], call)
    known = [site.call for site in sites(program, function)] if function is not None else []
    made = wraps(program, owner)
    return bool(known) and all(
        function_of(program.owner[each], each) is function_of(program.owner[one], one) and each.lineno < one.lineno
        for each in known
        for one in made
    )


def _is_prepare(call: ast.Call) -> bool:
    return last_name(call.func) == "prepare" and "accelerator" in ast.unparse(call.func)


def _loaded_wrapped(program: Program) -> bool:
    """Whether the program loads into the wrapper again: then the keys fit, within this program."""
    for call in program.named.get("load_state_dict", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is not None and wraps(program, owner) and not _before_wrapping(program, call, owner):
            return True
    return False


def _saved_calls(program: Program, call: ast.Call) -> list[ast.Call]:
    """The calls within what a torch.save writes, through names that hold a dictionary."""
    if not call.args:
        return []
    found, seen, waiting = list[ast.Call](), set[ast.AST](), [call.args[0]]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Call):
                found.append(each)
            if isinstance(each, ast.Name) and not qualified(program, each):
                for made in origins(program, each):
                    if isinstance(made, ast.Dict) or (
                        isinstance(made, ast.Call) and last_name(made.func) in ("state_dict", "dict")
                    ):
                        waiting.append(made)
                for binding in program.owner[each].attributes.items():
                    if binding[0].startswith(f"{each.id}["):
                        waiting.extend(b.value for b in binding[1] if isinstance(b.value, ast.expr))
    return found


@rule(
    "LS405",
    "pickle-load",
    "a file is unpickled without weights_only",
    result="a checkpoint from elsewhere can run any code as it is loaded",
    why="weights_only=False lets pickle call what the file names (before torch 2.6 that is the default)",
    mend='torch.load(path, map_location="cpu", weights_only=True)',
)
def pickle_load(program: Program) -> Iterator[Hit]:
    """torch.load without weights_only=True."""
    for call in loads(program):
        value = given(program, call, "weights_only")
        if _spreads(call):
            continue
        if value is None and not _newer_torch(program.root.path):
            yield Hit(call, "", _keyword(call, "weights_only=True"))
        elif value is not None and constant(program, value) is False:
            yield Hit(call, "weights_only=False")


def _newer_torch(path: Path) -> bool:
    """Whether a requirements file or pyproject.toml beside or above a script asks for torch 2.6 or later.

    That unpickles weights alone unless told otherwise.
    """
    for folder in list(path.parents)[:3]:
        for file in (*folder.glob("requirements*.txt"), folder / "pyproject.toml"):
            if file.is_file():
                found = re.search(
                    r"^\W*torch\s*(?:>=|==|~=)\s*(\d+)\.(\d+)", file.read_text(errors="replace"), re.MULTILINE
                )
                if found and (int(found[1]), int(found[2])) >= (2, 6):
                    return True
    return False


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
