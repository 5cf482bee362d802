"""Where a statement stands: in which loops, under which rank's condition, in training or in evaluation."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import depends, made_by, origins
from lockstep.commands.lint.program import Program, callee, definition, last_name, qualified, sites
from lockstep.commands.lint.source import Function, Loop, above, function_of

_RANK = re.compile(r"(^|_)rank$|^(local_)?process_index$|^proc_id$|^ngpus?_rank$|^rank_?id$")
_FIRST = re.compile(r"(^|_)(is_)?(main|master|chief|primary|rank_?zero|rank_?0|first|global_zero)(_process|_rank|_proc|_worker)?$"
                    r"|is_main_process|is_global_zero|is_local_main|is_master|on_main|should_save|distributed_rank_0")  # fmt: skip
_WORLD = re.compile(r"(^|_)(world(_?size)?|n_?procs?|num_proc(esse)?s|n_?gpus?(_per_node)?|num_(gpus|replicas|devices)"
                    r"|gpus|device_count|get_world_size|device_num|num_shards|world_sz|num_ranks|ranks|nnodes)$")  # fmt: skip
_RANK_CALLS = {"get_rank", "rank", "local_rank", "get_local_rank", "get_node_local_rank", "get_ordinal", "global_rank"}
_WORLD_CALLS = {"get_world_size", "world_size", "size", "device_count", "num_processes", "local_size", "get_nproc_per_node"}
LOADERS = ("DataLoader", "MultiEpochsDataLoader", "StatefulDataLoader", "create_loader", "auto_dataloader")


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
            return 1 if _rank_like(program, inner) else -side(program, inner, depth)
        case ast.BoolOp(op=ast.And(), values=values):
            return next((found for value in values if (found := side(program, value, depth)) > 0), 0) or next(
                (found for value in values if (found := side(program, value, depth))), 0
            )
        case ast.BoolOp(op=ast.Or(), values=values):
            return next((found for value in values if (found := side(program, value, depth))), 0)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if not (_rank_like(program, left) or _rank_like(program, right)):
                return 0
            return -1 if isinstance(op, ast.NotEq | ast.Gt | ast.NotIn | ast.IsNot) else 1
        case ast.Name(id=name) | ast.Attribute(attr=name):
            if _FIRST.search(name.lower()):
                return 1
            if _rank_like(program, test):
                return -1
            made = origins(program, test) if depth < 4 else []
            return next((side(program, each, depth + 1) for each in made if isinstance(each, ast.Compare | ast.BoolOp)), 0)
        case ast.Call(func=function):
            if _FIRST.search(last_name(function).lower()):
                return 1
            local = callee(program, test)
            values = [each.value for each in ast.walk(local) if isinstance(each, ast.Return)] if local else []
            return next((side(program, value, depth + 1) for value in values if value is not None and depth < 4), 0)
    return 0


def _rank_like(program: Program, node: ast.AST) -> bool:
    if any(is_rank(each) for each in ast.walk(node)):
        return True
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    made = origins(program, node)
    return bool(made) and all(_is_place(each) for each in made)


def _is_place(made: ast.AST) -> bool:
    """int(os.environ["LOCAL_RANK"]), dist.get_rank(), and a condition's value of one."""
    small = isinstance(made, ast.Call | ast.Subscript | ast.IfExp | ast.Constant)
    return small and not isinstance(made, ast.Constant) and any(is_rank(each) for each in ast.walk(made)) and not any(
        isinstance(each, ast.Call) and last_name(each.func) in ("device", "format", "join", "print") for each in ast.walk(made)
    )


def guard(program: Program, node: ast.AST) -> ast.If | ast.IfExp | None:
    """The innermost condition within the node's function that lets a part of the ranks come here."""
    found = _guard(program, node)
    return found if isinstance(found, ast.If | ast.IfExp) else None


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
        if early := _early(program, outer, inner):
            return early
        if isinstance(outer, ast.With) and any(_one_first(each.context_expr) for each in outer.items):
            return outer
        if isinstance(outer, Function):
            if any(_rank_zero_decorator(each) for each in outer.decorator_list):
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


def _rank_zero_decorator(node: ast.expr) -> bool:
    name = last_name(node.func) if isinstance(node, ast.Call) else last_name(node)
    return bool(re.search(r"rank_?zero_only|on_(local_)?main_process|main_process_only|one_rank_only|master_only", name))


def guarded(program: Program, node: ast.AST, depth: int = 0) -> bool:
    """Whether a part of the ranks alone comes here: by a condition above, or above all calls of the function."""
    if _guard(program, node) is not None:
        return True
    function = function_of(program.owner[node], node)
    calls = [site.call for site in sites(program, function)] if function is not None else []
    return bool(calls) and depth < 6 and all(guarded(program, call, depth + 1) for call in calls)


def loops(program: Program, node: ast.AST, depth: int = 0) -> list[list[Loop]]:
    """The loops around a place, from the inside out, one list for each way of calls that leads here."""
    source = program.owner[node]
    here: list[Loop] = []
    inner = node
    function: Function | None = None
    for outer in above(source, node):
        if isinstance(outer, Loop) and inner in outer.body:
            here.append(outer)
        if isinstance(outer, Function | ast.Lambda):
            function = outer if isinstance(outer, Function) else None
            break
        inner = outer
    calls = [site.call for site in sites(program, function) if not site.spawned] if function else []
    if not calls or depth > 6:
        return [here]
    return [here + rest for call in calls[:6] for rest in loops(program, call, depth + 1)][:16]


def inside(program: Program, node: ast.AST) -> list[ast.AST]:
    """All nodes within a statement, and within the local functions that it calls."""
    key = ("inside", node)
    if key not in program.memo:
        found, waiting, seen = [], [node], {node}
        while waiting:
            for each in ast.walk(waiting.pop()):
                found.append(each)
                if isinstance(each, ast.Call) and (function := callee(program, each)) and function not in seen:
                    seen.add(function)
                    waiting.append(function)
        program.memo[key] = found
    known = program.memo[key]
    assert isinstance(known, list)
    return known


def calls_in(program: Program, node: ast.AST, *names: str) -> list[ast.Call]:
    """The calls of these names within a statement and the local functions that it calls."""
    return [each for each in inside(program, node) if isinstance(each, ast.Call) and last_name(each.func) in names]


def backwards(program: Program) -> list[ast.Call]:
    """The calls that run a backward pass: loss.backward(), accelerator.backward(loss), manual_backward(loss)."""
    found = [*program.named.get("backward", []), *program.named.get("manual_backward", [])]
    return [each for each in found if isinstance(each.func, ast.Attribute) and not isinstance(
        definition(program, each.func.value), ast.ClassDef)]  # fmt: skip


def loaders_of(program: Program, loop: ast.AST) -> list[ast.Call]:
    """The calls that made the loaders which a loop runs over, through enumerate, tqdm and the like."""
    if not isinstance(loop, ast.For | ast.AsyncFor | ast.comprehension):
        return []
    found, waiting = [], [loop.iter]
    while waiting:
        node = waiting.pop()
        for made in origins(program, node):
            if isinstance(made, ast.Call):
                if last_name(made.func) in LOADERS:
                    found.append(made)
                elif definition(program, made.func) is None or made is node:
                    waiting.extend(each for each in made.args if not isinstance(each, ast.Starred) and each is not node)
    return list(dict.fromkeys(found))


def over_loader(program: Program, loop: ast.AST) -> bool:
    """Whether a loop runs over batches, by what made them or by a name."""
    if loaders_of(program, loop):
        return True
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return False
    return any(
        re.search(r"loader|_dl$|^dl_|batches|iterator|prefetcher", last_name(each).lower())
        for each in ast.walk(loop.iter)
        if last_name(each) not in ("range", "len") and not _counted(loop.iter, each)
    )


def _counted(whole: ast.expr, node: ast.AST) -> bool:
    """Whether a name stands in range(len(name)) only."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in ("len", "range") and node in ast.walk(each)
        for each in ast.walk(whole)
    )


def step_loops(program: Program) -> dict[Loop, list[Loop]]:
    """The loops over training batches -> the loops around each, from the inside out."""
    if "step_loops" not in program.memo:
        found: dict[Loop, list[Loop]] = {}
        for call in backwards(program):
            for path in loops(program, call):
                if path:
                    place = next((n for n, loop in enumerate(path) if over_loader(program, loop)), 0)
                    known = found.setdefault(path[place], [])
                    known.extend(loop for loop in path[place + 1 :] if loop not in known)
        program.memo["step_loops"] = found
    known_loops = program.memo["step_loops"]
    assert isinstance(known_loops, dict)
    return known_loops


def evaluation_loops(program: Program) -> list[Loop]:
    """The loops over batches that call a model, and run no backward pass."""
    if "evaluation_loops" not in program.memo:
        program.memo["evaluation_loops"] = list(_evaluation_loops(program))
    found = program.memo["evaluation_loops"]
    assert isinstance(found, list)
    return found


def _evaluation_loops(program: Program) -> Iterator[Loop]:
    for source in program.sources:
        for node in source.nodes:
            if isinstance(node, Loop) and over_loader(program, node) and not calls_in(program, node, "backward", "step"):
                nested = any(isinstance(each, Loop) and each is not node and over_loader(program, each)
                             for each in inside(program, node))  # fmt: skip
                if not nested and model_calls(program, node):
                    yield node


def model_calls(program: Program, node: ast.AST) -> list[ast.Call]:
    """The calls of a model within a statement: of an object that is one, or is called so."""
    found = []
    for each in inside(program, node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name | ast.Attribute) and each.args:
            name = last_name(each.func).lower()
            named = re.search(r"(^|_)(model|net|network|ddp|classifier|backbone|resnet|wrapped|m)(_?\w*)?$", name)
            if (named and not qualified(program, each.func) and callee(program, each) is None) or (isinstance(each.func, ast.Name) and made_by(program, each.func, "DistributedDataParallel")):
                found.append(each)
    return found


def per_rank(program: Program, node: ast.AST) -> bool:
    """Whether a place runs once in each process: all of it under torchrun, what is spawned where the program spawns."""
    started = [site for call in program.calls for site in _spawned(program, call)]
    if not started:
        return True
    return any(node in set(inside(program, each)) for each in started)


def _spawned(program: Program, call: ast.Call) -> list[Function]:
    if last_name(call.func) not in ("spawn", "start_processes", "Process", "notebook_launcher"):
        return []
    target = next((each.value for each in call.keywords if each.arg in ("target", "fn")), None) or next(iter(call.args), None)
    found = definition(program, target) if target is not None else None
    return [found] if isinstance(found, Function) else []


def on_rank(program: Program, node: ast.AST) -> bool:
    """Whether a value depends on the rank."""
    return depends(program, node, is_rank)


def on_world(program: Program, node: ast.AST) -> bool:
    """Whether a value depends on the number of processes."""
    return depends(program, node, is_world)
