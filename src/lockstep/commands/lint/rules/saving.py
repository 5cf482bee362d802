"""Rules about checkpoints: who writes, what is in them, what is read back."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import method, sites
from lockstep.commands.lint.dispatch import makings, runs_of
from lockstep.commands.lint.guards import guarded, per_rank
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import (
    comes_by,
    distributed,
    given,
    library,
    lightning,
    starts_group,
    wrapped,
)
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.source import above, class_of, function_of


def saves(program: Program) -> list[ast.Call]:
    """The calls of torch.save."""
    return [call for call in program.named.get("save", []) if qualified(program, call.func) == "torch.save"]


def in_memory(program: Program, call: ast.Call) -> bool:
    """Whether a torch.save writes into a buffer, not into a file."""
    path = given(program, call, "f", 1)
    made = origins(program, path) if path is not None else []
    return any(isinstance(each, ast.Call) and last_name(each.func) == "BytesIO" for each in made)


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
    several = any(comes_by(program, each) for each in wrapped(program)) or starts_group(program)
    several = several or bool(program.named.get("Fabric")) or (lightning(program) and distributed(program))
    if not (several or library(program, "horovod", "accelerate", "ignite.distributed")):
        return
    for call, path in _written(program):
        named = path is not None and on_rank(program, path)
        if (
            not named
            and not in_memory(program, call)
            and not guarded(program, call)
            and per_rank(program, call)
            and _reached(program, call)
            and not _of_one_rank(program, call)
            and not _master_saves(program, call)
        ):
            yield Hit(call)


def _written(program: Program) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """The calls that write weights into a file, and its path; in Lightning's modules and callbacks, their hooks'."""
    known = [(call, given(program, call, "f", 1)) for call in saves(program)]
    for name in ("save_file", "save_model", "save", "dump"):
        for call in program.named.get(name, []):
            text = qualified(program, call.func)
            if text in ("safetensors.torch.save_file", "safetensors.torch.save_model", "torch.jit.save"):
                known.append((call, call.args[1] if len(call.args) > 1 else None))
            elif text == "pickle.dump" and len(call.args) > 1 and "state_dict()" in ast.unparse(call.args[0]):
                known.append((call, call.args[1]))
    sharded = any(
        re.search(r"fsdp|fully_?shard|parallelism|deepspeed", one.text, re.IGNORECASE) for one in program.sources
    )
    for call in program.named.get("save_pretrained", []) if not sharded else []:  # where all ranks have to call it
        keys = {each.arg for each in call.keywords}
        of_words = re.search("token|processor", ast.unparse(call.func))
        if call.args and not of_words and not keys & {"is_main_process", None}:
            known.append((call, call.args[0]))
    for call, path in known:
        function = function_of(program.owner[call], call)
        if not lightning(program) or (function is not None and function.name.startswith("on_")):
            yield call, path


def _of_one_rank(program: Program, call: ast.Call) -> bool:
    """Whether a call stands in a class that one rank alone makes objects of, or nobody in the program."""
    owner = class_of(program.owner[call], call)
    function = function_of(program.owner[call], call)
    if owner is None or (lightning(program) and function is not None and function.name.startswith("on_")):
        return False
    made = makings(program).get(owner, [])
    return (bool(made) or method(program, owner, "__init__") is not None) and all(
        guarded(program, each) for each in made
    )


def _reached(program: Program, call: ast.Call) -> bool:
    """Whether somebody in the program calls the function that a call stands in, or runs it as a hook on each rank."""
    function = function_of(program.owner[call], call)
    if function is None or sites(program, function) or function.name in ("main", "train", "run"):
        return True
    if lightning(program) and function.name.startswith("on_"):
        return True
    runs = runs_of(program, function)
    return bool(runs) and not all(guarded(program, each) for each in runs)


def _master_saves(program: Program, call: ast.Call) -> bool:
    """Whether the function is a wrapper that asks for the rank by an argument (`is_main`, `should_save`)."""
    for outer in above(program.owner[call], call):
        if isinstance(outer, ast.If) and re.search(
            r"rank|main|master|primary|save_on|chief|zero", ast.unparse(outer.test).lower()
        ):
            return True
    return False
