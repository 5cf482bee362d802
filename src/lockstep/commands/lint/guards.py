"""Which ranks come by a place: conditions above it, early returns, decorators, and those around a function's calls."""

import ast
import re

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.ranks import rank_like, side
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, parameters
from lockstep.commands.lint.splitting import asks_for_object
from lockstep.commands.lint.tree import text_of, walk


def guard(program: Program, node: ast.AST) -> ast.If | ast.IfExp | None:
    """The innermost condition within the node's function that lets a part of the ranks come here."""
    found = _guard(program, node)
    return found if isinstance(found, ast.If | ast.IfExp) else None


def kept_out(program: Program, node: ast.AST) -> ast.AST | None:
    """What keeps a part of the ranks from a place: a condition, or its function by a decorator."""
    found = _guard(program, node)
    return found if isinstance(found, ast.If | ast.IfExp | ast.BoolOp | ast.While | ast.Match | Function) else None


_HOLDERS = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.match_case, ast.With),
    *(ast.AsyncWith, ast.Try, ast.TryStar, ast.ExceptHandler, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    ast.Module,
)


def _guard(program: Program, node: ast.AST) -> ast.AST | None:
    source, below = program.owner[node], list[tuple[str, ast.AST]]()
    found: ast.AST | None = None
    inner = node
    for outer in above(source, node):
        if not isinstance(outer, _HOLDERS):
            inner = outer
            continue
        key = ("guard", inner)  # what keeps ranks from a statement keeps them from all that is in it
        if key in program.memo:
            found = program.memo[key]
            break
        below.append(key)
        if (found := _kept_by(program, outer, inner)) is not None or isinstance(outer, Function):
            break
        inner = outer
    program.memo.update(dict.fromkeys(below, found))
    return found


def _kept_by(program: Program, outer: ast.AST, inner: ast.AST) -> ast.AST | None:
    """What of a node keeps a part of the ranks from what stands right below it: the node, or what is above there."""
    if isinstance(outer, ast.If) and inner is not outer.test:
        which = side(program, outer.test) or asks_for_object(program, outer.test)
        if (inner in outer.body and which) or (inner in outer.orelse and which):
            return outer
    if isinstance(outer, ast.IfExp) and inner is outer.body and side(program, outer.test):
        return outer
    if isinstance(outer, ast.BoolOp) and _behind(program, outer, inner):
        return outer
    if isinstance(outer, ast.While) and inner in outer.body and side(program, outer.test):
        return outer
    if isinstance(outer, ast.Match) and inner is not outer.subject and rank_like(program, outer.subject):
        return outer
    if early := _early(program, outer, inner):
        return early
    if isinstance(outer, ast.With) and any(_one_first(each.context_expr) for each in outer.items):
        return outer
    if isinstance(outer, Function) and any(only_on_one(program, each) for each in outer.decorator_list):
        return outer
    return None


def _early(program: Program, outer: ast.AST, inner: ast.AST) -> ast.If | None:
    """`if rank != 0: return` (or continue) above a statement of the same block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(outer, name, None)
        if isinstance(block, list) and inner in block:
            for each in block[: block.index(inner)]:
                leaves = isinstance(each, ast.If) and each.body and isinstance(each.body[-1], ast.Return | ast.Continue)
                if leaves and isinstance(each, ast.If) and side(program, each.test):
                    return each
    return None


def _one_first(node: ast.expr) -> bool:
    name = last_name(node.func) if isinstance(node, ast.Call) else last_name(node)
    return bool(re.search(r"main_process_first|rank_zero_first|zero_first|one_rank_first|lock", name.lower()))


def _behind(program: Program, whole: ast.BoolOp, inner: ast.AST) -> bool:
    """`rank == 0 and print(x)`, `rank or print(x)`, where that is a statement."""
    if not isinstance(program.owner[whole].parents[whole], ast.Expr):
        return False
    before = whole.values[: whole.values.index(inner)] if isinstance(inner, ast.expr) else []
    return any(side(program, each) for each in before)


def only_on_one(program: Program, node: ast.expr) -> bool:
    """Whether a decorator lets one rank alone run a function: by its name, or by what the local one does."""
    name = last_name(node.func) if isinstance(node, ast.Call) else last_name(node)
    if re.search(r"rank_?zero_only|on_(local_)?main_process|main_process_only|one_rank_only|master_only", name):
        return True
    found = definition(program, node.func if isinstance(node, ast.Call) else node)
    return found is not None and _runs_on_one(program, found)


@remembered
def _runs_on_one(program: Program, decorator: Function | ast.ClassDef) -> bool:
    """Whether a local decorator calls the function that it is given, and under a rank's condition alone."""
    source = program.owner[decorator]
    inner = [each for each in walk(decorator) if isinstance(each, Function)]
    given = {each.arg for function in inner for each in parameters(function)} - {"self"}
    calls = []
    for each in walk(decorator):
        if isinstance(each, ast.Call):
            kept = source.attributes.get(text_of(each.func), []) if isinstance(decorator, ast.ClassDef) else []
            held = any(isinstance(one.value, ast.Name) and one.value.id in given for one in kept)
            if (isinstance(each.func, ast.Name) and each.func.id in given) or held:
                calls.append(each)
    wraps = isinstance(decorator, ast.ClassDef) or len(inner) > 1
    return wraps and bool(calls) and all(_guard(program, each) is not None for each in calls)


def guarded(program: Program, node: ast.AST, depth: int = 0) -> bool:
    """Whether a part of the ranks alone comes here: by a condition above, or above all calls of the function."""
    if _guard(program, node) is not None:
        return True
    function = function_of(program.owner[node], node)
    calls = [site.call for site in sites(program, function)] if function is not None else []
    return bool(calls) and depth < 6 and all(guarded(program, call, depth + 1) for call in calls)


def per_rank(program: Program, node: ast.AST) -> bool:
    """Whether a place runs once in each process: all of it under torchrun, what is spawned where the program spawns."""
    started = [site for call in program.calls for site in _spawned(program, call)]
    if not started:
        return True
    return any(node in set(inside(program, each)) for each in started)


def _spawned(program: Program, call: ast.Call) -> list[Function]:
    if last_name(call.func) not in ("spawn", "start_processes", "Process", "notebook_launcher"):
        return []
    target = next((each.value for each in call.keywords if each.arg in ("target", "fn")), None) or next(
        iter(call.args), None
    )
    found = definition(program, target) if target is not None else None
    return [found] if isinstance(found, Function) else []
