"""Rules about checkpoints: who writes, what is in them, what is read back."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import method
from lockstep.commands.lint.dispatch import handed_on, makings, runs_of
from lockstep.commands.lint.guards import guarded, per_rank
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.states import as_save
from lockstep.commands.lint.rules.writing import written_files
from lockstep.commands.lint.several import comes_by, distributed, library, lightning, starts_group, wrapped
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.tree import text_of


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
    for call, path in written_files(program):
        named = path is not None and on_rank(program, path)
        if (
            not named
            and not guarded(program, call)
            and not guarded(program, as_save(program, call).func)  # write = torch.save if rank == 0 else nothing
            and per_rank(program, call)
            and _reached(program, call)
            and not _of_one_rank(program, call)
            and not _master_saves(program, call)
        ):
            yield Hit(call)


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
    started = [*runs_of(program, function), *handed_on(program, function)]
    return bool(started) and not all(guarded(program, each) for each in started)


def _master_saves(program: Program, call: ast.Call) -> bool:
    """Whether the function is a wrapper that asks for the rank by an argument (`is_main`, `should_save`)."""
    for outer in above(program.owner[call], call):
        if isinstance(outer, ast.If) and re.search(
            r"rank|main|master|primary|save_on|chief|zero", text_of(outer.test).lower()
        ):
            return True
    return False
