"""Rules about files that are read back."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.ranks import guarded, on_rank
from lockstep.commands.lint.roles import distributed, given
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.saving import loads, saves
from lockstep.commands.lint.source import function_of, statement_of


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
    if path is None or on_rank(program, path) or of_data(program, call):
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


def of_data(program: Program, call: ast.Call) -> bool:
    """Whether a file holds data that were prepared, by its name or by that of what is read."""
    path, target = given(program, call, "f", 0), statement_of(program.owner[call], call)
    names = ast.unparse(target.targets[0]) if isinstance(target, ast.Assign) else ""
    names += ast.unparse(path) if path is not None else ""
    return bool(re.search(r"dataset|cache|feature|label|vocab", names.lower()))


def _spreads(call: ast.Call) -> bool:
    return any(each.arg is None for each in call.keywords)


def _keyword(call: ast.Call, text: str) -> tuple[Edit, ...]:
    """A keyword after a call's last argument."""
    parts = [*call.args, *(each.value for each in call.keywords)]
    last = max(parts, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0), default=None)
    if last is None or last.end_lineno is None or last.end_col_offset is None or isinstance(last, ast.GeneratorExp):
        return ()
    return (insert(last.end_lineno, last.end_col_offset, f", {text}"),)
