"""What is a rank, what a number of processes, and which ranks a condition asks for."""

import ast
import re

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import walk

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
            return bool(_RANK.search(name)) or node.__dict__.get("meant") == "rank"
        case ast.Call(func=function):
            return last_name(function) in _RANK_CALLS
        case ast.Constant(value=str(text)):
            return text in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK")
    return False


def is_world(node: ast.AST) -> bool:
    """The number of processes, by name, call or environment."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(_WORLD.search(name.lower())) or node.__dict__.get("meant") == "world"
        case ast.Call(func=function):
            return last_name(function) in _WORLD_CALLS
        case ast.Constant(value=str(text)):
            return text in ("WORLD_SIZE", "SLURM_NTASKS", "LOCAL_WORLD_SIZE")
    return False


@remembered
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
                [each.value for each in walk(local) if isinstance(each, ast.Return) and each.value] if local else []
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


@remembered
def rank_like(program: Program, node: ast.AST) -> bool:
    """Whether an expression is a rank, by what is in it or by where it comes from."""
    if any(is_rank(each) for each in walk(node)):
        return True
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    if isinstance(node, ast.Attribute) and node.attr == "index":  # of torch.device("cuda", local_rank)
        owners = [each for each in origins(program, node.value) if isinstance(each, ast.Call)]
        devices = [each for each in owners if qualified(program, each.func) == "torch.device"]
        return bool(devices) and all(rank_like(program, part) for each in devices for part in each.args[1:2])
    made = origins(program, node)
    return bool(made) and all(_is_place(each) for each in made)


def _is_place(made: ast.AST) -> bool:
    """int(os.environ["LOCAL_RANK"]), dist.get_rank(), and a condition's value of one."""
    small = isinstance(made, ast.Call | ast.Subscript | ast.IfExp | ast.Constant)
    return (
        small
        and not isinstance(made, ast.Constant)
        and any(is_rank(each) for each in walk(made))
        and not any(
            isinstance(each, ast.Call) and last_name(each.func) in ("device", "format", "join", "print")
            for each in walk(made)
        )
    )


@remembered
def on_rank(program: Program, node: ast.AST) -> bool:
    """Whether a value depends on the rank."""
    return depends(program, node, is_rank)


@remembered
def on_world(program: Program, node: ast.AST) -> bool:
    """Whether a value depends on the number of processes."""
    return depends(program, node, is_world)
