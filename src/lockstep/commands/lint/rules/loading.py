"""Rules about files that are read back."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of, statement_of
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.guards import guarded
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.rules.states import as_load, loads, saves
from lockstep.commands.lint.several import distributed
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.standins import runs
from lockstep.commands.lint.tree import text_of, walk


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
    scripts = list(runs(program, "torch.jit.load"))
    for call in [*loads(program), *scripts]:
        seen = runs(program, "torch.jit.load").get(call) or as_load(program, call)
        place = given(program, seen, "map_location", 1)
        lacking = place is None and not _spreads(program, call)
        first = place is not None and _on_first_gpu(program, place)
        nowhere = place is not None and constant(program, place) is None
        if distributed(program) and gpu and (lacking or nowhere or first):
            if any(_other_branch(program, call, each) for each in loads(program)):
                continue  # the way of a single device, beside that of several
            if guarded(program, call) or _no_checkpoint(program, call):
                continue
            detail = "onto cuda:0, from each rank" if first else ""
            safe = lacking and not _open(call) and seen is call
            yield Hit(call, detail, _keyword(call, 'map_location="cpu"') if safe else ())


def _on_first_gpu(program: Program, place: ast.expr) -> bool:
    """Whether a map_location is GPU 0 on all ranks: "cuda:0", torch.device("cuda", 0), lambda s, l: s.cuda(0)."""
    made = origins(program, place)
    return bool(made) and all(_is_first_gpu(each) for each in made)


def _is_first_gpu(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value="cuda:0"):
            return True
        case (
            ast.Call(args=[ast.Constant(value="cuda:0")])
            | ast.Call(args=[ast.Constant(value="cuda"), ast.Constant(value=0)])
        ):
            return last_name(node.func) == "device"
        case ast.Dict(values=values) if values:
            return all(isinstance(each, ast.Constant) and each.value == "cuda:0" for each in values)
        case ast.Lambda(body=ast.Call(func=ast.Attribute(attr="cuda"), args=[ast.Constant(value=0)])):
            return True
    return False


def _other_branch(program: Program, call: ast.Call, other: ast.Call) -> bool:
    """Whether the same file is loaded elsewhere in the function, onto a named device."""
    same = bool(call.args and other.args) and ast.dump(call.args[0]) == ast.dump(other.args[0])
    return (
        same
        and other is not call
        and other in own_nodes(program, call)
        and given(program, as_load(program, other), "map_location", 1) is not None
    )


def _no_checkpoint(program: Program, call: ast.Call) -> bool:
    """Whether a file holds a rank's own tensors, data that were prepared, or what was brought to the CPU before."""
    path = given(program, as_load(program, call), "f", 0)
    function = function_of(program.owner[call], call)
    owner = class_of(program.owner[call], call)
    network = owner is not None and any(re.search(r"Module$|Net|Model", text_of(each)) for each in owner.bases)
    begins = function is not None and function.name == "__init__"
    of_network = begins and (network or owner is None)  # pretrained weights, as they were published
    if path is None or on_rank(program, path) or of_data(program, call):
        return True
    if of_network or "pretrain" in text_of(path).lower():
        return True
    texts = {each.value for each in walk(path) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return any(
        ".cpu()" in text_of(save.args[0])
        and any(isinstance(each, ast.Constant) and each.value in texts for each in walk(save))
        for save in saves(program)
        if save.args
    )


def of_data(program: Program, call: ast.Call) -> bool:
    """Whether a file holds data that were prepared, by its name or by that of what is read."""
    path, target = given(program, as_load(program, call), "f", 0), statement_of(program.owner[call], call)
    names = text_of(target.targets[0]) if isinstance(target, ast.Assign) else ""
    names += text_of(path) if path is not None else ""
    return bool(re.search(r"dataset|cache|feature|label|vocab", names.lower()))


def _open(call: ast.Call) -> bool:
    return any(each.arg is None for each in call.keywords)


def _spreads(program: Program, call: ast.Call) -> bool:
    """Whether a call takes arguments that can't be told: those of a dictionary that is written out can."""
    made = [one for each in call.keywords if each.arg is None for one in origins(program, each.value)]
    return _open(call) and not all(_written_out(each) or _never_given(program, call, each) for each in made)


def _never_given(program: Program, call: ast.Call, node: ast.AST) -> bool:
    """Whether a function's own **words never hold map_location: no call gives it, and nothing adds it."""
    function = function_of(program.owner[call], call)
    if not isinstance(node, ast.Name) or function is None or function.args.kwarg is None:
        return False
    known = sites(program, function)
    words = {each.arg for site in known for each in site.call.keywords}
    changed = any(each is not node and each.id == node.id for each in _names(function) if isinstance(each, ast.Name))
    return function.args.kwarg.arg == node.id and bool(known) and not words & {None, "map_location"} and not changed


def _names(function: Function) -> list[ast.AST]:
    return [each for part in function.body for each in walk(part)]


def _written_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        return None not in node.keys
    return isinstance(node, ast.Call) and last_name(node.func) == "dict" and not (node.args or _open(node))


def _keyword(call: ast.Call, text: str) -> tuple[Edit, ...]:
    """A keyword after a call's last argument."""
    parts = [*call.args, *(each.value for each in call.keywords)]
    last = max(parts, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0), default=None)
    if last is None or last.end_lineno is None or last.end_col_offset is None or isinstance(last, ast.GeneratorExp):
        return ()
    return (insert(last.end_lineno, last.end_col_offset, f", {text}"),)
