"""The rule about the process group's end: whether the program comes by it."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, following, function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.guards import guard
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.ranks import side
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.mending import ending
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.splitting import splits
from lockstep.commands.lint.tree import text_of, walk


@rule(
    "LS306",
    "init-without-end",
    "the process group is never destroyed",
    result="with NCCL a warning at each end, and now and then a hang or an abort after the last line of the training",
    why="init_process_group starts threads that destroy_process_group ends",
    mend="dist.destroy_process_group()  # the last line of what each rank runs",
)
def init_without_end(program: Program) -> Iterator[Hit]:
    """init_process_group in a program that never comes by destroy_process_group, or on one rank alone."""
    if library(program, "deepspeed") or not program.whole:
        return
    begun = _begun(program)
    if not any(program.owner[each] is program.root for each in begun) and len(program.sources) < 2:
        return
    ends = [each for name in ("destroy_process_group", "finalize") for each in _mentions(program, name)]
    if ends and not all(_unused(program, each) for each in ends):
        used = [each for each in ends if not _unused(program, each)]
        if begun and all(_on_one_rank(program, each) for each in used):
            yield Hit(used[0], "one rank alone comes here")
        elif begun and all(_aside(program, each) for each in used):
            yield Hit(begun[0], "only a way that leaves early, or an error, comes by its end")
        return
    for call in [each for each in begun if not (ends and _unused(program, each))][:1]:
        if "__main__" in program.root.text or program.owner[call] is program.root:
            yield Hit(call, "", () if ends else ending(program, call))


def _begun(program: Program) -> list[ast.Call]:
    """The calls that begin a group."""
    found = [each for each in program.named.get("init_process_group", []) if definition(program, each.func) is None]
    for name, meant in (
        ("init_device_mesh", "torch.distributed.device_mesh.init_device_mesh"),
        ("initialize", "ignite.distributed.initialize"),
    ):
        found += [each for each in program.named.get(name, []) if qualified(program, each.func) == meant]
    return found


def _mentions(program: Program, name: str) -> list[ast.AST]:
    """Where a function is called, handed on, or asked for by name: neither imported nor told of in a comment."""
    return [] if not any(name in source.text for source in program.sources) else _named(program).get(name, [])


@remembered
def _named(program: Program) -> dict[str, list[ast.AST]]:
    """The names, attributes and one-word texts of a program, by what they say."""
    found: dict[str, list[ast.AST]] = {}
    for source in program.sources:
        for node in source.of(ast.Constant, ast.Name, ast.Attribute):
            text = node.value if isinstance(node, ast.Constant) else last_name(node)
            if isinstance(text, str) and text.isidentifier():
                found.setdefault(text, []).append(node)
    return found


def _unused(program: Program, node: ast.AST, depth: int = 0) -> bool:
    """Whether a place is in a function that nothing in the program calls or names."""
    source = program.owner[node]
    function = function_of(source, node)
    if function is None or depth > 4 or re.fullmatch(r"__\w+__", function.name) or _decorated(function):
        return False
    own = isinstance(source.parents[function], ast.ClassDef)
    for other in _named(program).get(function.name, []):
        inside = function in above(program.owner[other], other)
        another = own and isinstance(other, ast.Attribute) and _of_library(program, other.value)
        if not inside and not another and not _unused(program, other, depth + 1):
            return False
    return True


def _decorated(function: Function) -> bool:
    """Whether a decorator may enter a function in a list of such."""
    known = ("contextmanager", "staticmethod", "no_grad", "inference_mode", "property")
    return any(last_name(each) not in known for each in function.decorator_list)


def _of_library(program: Program, node: ast.expr) -> bool:
    """Whether an object was made by a library, so that its methods are not those of a local class."""
    made = origins(program, node)
    return bool(made) and all(
        isinstance(each, ast.Call) and definition(program, each.func) is None and bool(qualified(program, each.func))
        for each in made
    )


def _on_one_rank(program: Program, node: ast.AST) -> bool:
    condition = guard(program, node)
    if not isinstance(condition, ast.If) or not splits(program, condition.test):
        return False
    text = text_of(condition.test)
    if re.search(r"world|distributed\b|initialized|available|-1", text):
        return False
    within = any(node in walk(each) for each in condition.body)
    beside = any(node in walk(each) for each in condition.orelse)
    return side(program, condition.test) == (1 if within else -1) and not beside


def _aside(program: Program, node: ast.AST) -> bool:
    """Whether a place is come by after an error alone, or where a condition ends the function early."""
    source = program.owner[node]
    if not isinstance(node, ast.expr) or not isinstance(source.parents[node], ast.Call):
        return False
    inner: ast.AST = node
    for outer in above(source, node):
        if isinstance(outer, ast.ExceptHandler):
            return True
        if isinstance(outer, ast.Try) and inner in outer.finalbody:
            return False
        if isinstance(outer, ast.If) and inner in outer.body and isinstance(outer.body[-1], ast.Return):
            asks = re.search(r"distributed\b|initialized|available|world", text_of(outer.test))
            return bool(following(source, outer)) and not outer.orelse and not asks
        if isinstance(outer, Function):
            return False
        inner = outer
    return False
