"""Which ranks come by a statement: what is a rank, what a number of processes, and which conditions ask for one."""

import ast
import re

from lockstep.commands.lint.calls import callee, definition, sites
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.source import Function, above, function_of, parameters

_RANK = re.compile(r"(^|_)rank$|^(local_)?process_index$|^proc_id$|^ngpus?_rank$|^rank_?id$")


_FIRST = re.compile(
    r"(^|_)(is_)?(main|master|chief|primary|rank_?zero|rank_?0|first|global_zero)(_process|_rank|_proc|_worker)?$"
    r"|is_main_process|is_global_zero|is_local_main|is_master|on_main|should_save|distributed_rank_0|world_zero|is_leader|coordinator"
)
_WORLD = re.compile(
    r"(^|_)(world(_?size)?|n_?procs?|num_proc(esse)?s|n_?gpus?(_per_node)?|num_(gpus|replicas|devices)|gpus|device_count"
    r"|get_world_size|device_num|num_shards|world_sz|num_ranks|ranks|nnodes)$"
)
_RANK_CALLS = {"get_rank", "rank", "local_rank", "get_local_rank", "get_node_local_rank", "get_ordinal", "global_rank"}
_WORLD_CALLS = {
    "get_world_size",
    "world_size",
    "size",
    "device_count",
    "num_processes",
    "local_size",
    "get_nproc_per_node",
}


def is_rank(node: ast.AST) -> bool:
    """A rank by its name, by a call of a process group, or from the environment."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(_RANK.search(name))
        case ast.Call(func=function):
            return last_name(function) in _RANK_CALLS
        case ast.Constant(value=str(text)):
            return text in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")
    return False


def is_world(node: ast.AST) -> bool:
    """The number of processes, by name, call or environment."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(_WORLD.search(name.lower()))
        case ast.Call(func=function):
            return last_name(function) in _WORLD_CALLS
        case ast.Constant(value=str(text)):
            return text in ("WORLD_SIZE", "SLURM_NTASKS", "LOCAL_WORLD_SIZE")
    return False


def side(program: Program, test: ast.expr, depth: int = 0) -> int:
    """Which ranks a condition lets in: 1 one rank (or one a machine), -1 all but one, 0 it is about something else."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return 1 if rank_like(program, inner) else -side(program, inner, depth)
        case ast.BoolOp(op=ast.And(), values=values):
            return next((found for value in values if (found := side(program, value, depth)) > 0), 0) or next(
                (found for value in values if (found := side(program, value, depth))), 0
            )
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((found for value in values if (found := side(program, value, depth))), 0)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if not (rank_like(program, left) or rank_like(program, right)):
                return int(_first_gpu(left, op, right))
            return -1 if isinstance(op, ast.NotEq | ast.Gt | ast.NotIn | ast.IsNot) else 1
        case ast.Subscript():
            return _by_origin(program, test, depth)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            if isinstance(test, ast.Name) and isinstance(definition(program, test), Function):
                return 0  # the function itself, which is true on all ranks
            if _FIRST.search(name.lower()):
                return 1
            if rank_like(program, test):
                return -1
            return _by_origin(program, test, depth)
        case ast.Call(func=function):
            if _FIRST.search(last_name(function).lower()):
                return 1
            local = callee(program, test)
            values = (
                [each.value for each in ast.walk(local) if isinstance(each, ast.Return) and each.value] if local else []
            )
            return next((side(program, value, depth + 1) for value in values if depth < 4), 0)
    return 0


def _by_origin(program: Program, test: ast.expr, depth: int) -> int:
    made = [each for each in origins(program, test) if isinstance(each, ast.Compare | ast.BoolOp)] if depth < 4 else []
    return next((side(program, each, depth + 1) for each in made), 0)


def _first_gpu(left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
    """`gpu_id == 0`: where each process has a GPU, the first process of a machine."""
    zero = isinstance(right, ast.Constant) and right.value == 0 and isinstance(op, ast.Eq)
    return zero and bool(re.search(r"^(local_)?gpu(_?id)?$", last_name(left)))


def is_first(name: str) -> bool:
    """Whether a name in lower case says that this is the first rank."""
    return bool(_FIRST.search(name))


def rank_like(program: Program, node: ast.AST) -> bool:
    """Whether an expression is a rank, by what is in it or by where it comes from."""
    if any(is_rank(each) for each in ast.walk(node)):
        return True
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    made = origins(program, node)
    return bool(made) and all(_is_place(each) for each in made)


def _is_place(made: ast.AST) -> bool:
    """int(os.environ["LOCAL_RANK"]), dist.get_rank(), and a condition's value of one."""
    small = isinstance(made, ast.Call | ast.Subscript | ast.IfExp | ast.Constant)
    return (
        small
        and not isinstance(made, ast.Constant)
        and any(is_rank(each) for each in ast.walk(made))
        and not any(
            isinstance(each, ast.Call) and last_name(each.func) in ("device", "format", "join", "print")
            for each in ast.walk(made)
        )
    )


def guard(program: Program, node: ast.AST) -> ast.If | ast.IfExp | None:
    """The innermost condition within the node's function that lets a part of the ranks come here."""
    found = _guard(program, node)
    return found if isinstance(found, ast.If | ast.IfExp) else None


def kept_out(program: Program, node: ast.AST) -> ast.AST | None:
    """What keeps a part of the ranks from a place: a condition, or its function by a decorator."""
    found = _guard(program, node)
    return found if isinstance(found, ast.If | ast.IfExp | ast.BoolOp | Function) else None


def _guard(program: Program, node: ast.AST) -> ast.AST | None:
    source = program.owner[node]
    inner: ast.AST = node
    for outer in above(source, node):
        if isinstance(outer, ast.If) and inner is not outer.test:
            which = side(program, outer.test)
            if (inner in outer.body and which) or (inner in outer.orelse and which):
                return outer
        if isinstance(outer, ast.IfExp) and inner is outer.body and side(program, outer.test):
            return outer
        if isinstance(outer, ast.BoolOp) and _behind(program, outer, inner):
            return outer
        if early := _early(program, outer, inner):
            return early
        if isinstance(outer, ast.With) and any(_one_first(each.context_expr) for each in outer.items):
            return outer
        if isinstance(outer, Function):
            if any(only_on_one(program, each) for each in outer.decorator_list):
                return outer
            return None
        inner = outer
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
    """`rank == 0 and print(x)`, where that is a statement."""
    if not (isinstance(whole.op, ast.And) and isinstance(program.owner[whole].parents[whole], ast.Expr)):
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
    inner = [each for each in ast.walk(decorator) if isinstance(each, Function)]
    given = {each.arg for function in inner for each in parameters(function)} - {"self"}
    calls = []
    for each in ast.walk(decorator):
        if isinstance(each, ast.Call):
            kept = source.attributes.get(ast.unparse(each.func), []) if isinstance(decorator, ast.ClassDef) else []
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


def on_rank(program: Program, node: ast.AST) -> bool:
    """Whether a value depends on the rank."""
    return depends(program, node, is_rank)


def on_world(program: Program, node: ast.AST) -> bool:
    """Whether a value depends on the number of processes."""
    return depends(program, node, is_world)
