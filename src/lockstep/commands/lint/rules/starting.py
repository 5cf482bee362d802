"""Rules about how processes start: the main guard, fork."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import sites
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import per_rank
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.source import above, function_of, statement_of


@rule(
    "LS314",
    "no-main-guard",
    "processes are spawned without a main guard",
    result="RuntimeError in each child: an attempt has been made to start a new process before bootstrapping has "
    "finished",
    why="a spawned process imports the file anew, and comes by the line that spawns",
    mend='if __name__ == "__main__":\n    mp.spawn(run, args=(world_size,), nprocs=world_size)',
)
def no_main_guard(program: Program) -> Iterator[Hit]:
    """mp.spawn that a file runs as it is imported."""
    for call in program.calls:
        name = qualified(program, call.func)
        spawns = (
            name.endswith(("multiprocessing.spawn", "ignite.distributed.spawn"))
            or name.endswith("multiprocessing.spawn.spawn")
            or (
                name.endswith("multiprocessing.start_processes")
                and constant(program, given(program, call, "start_method")) != "fork"
            )
        )
        started = {
            constant(program, each.args[0] if each.args else None)
            for each in [*program.named.get("set_start_method", []), *program.named.get("get_context", [])]
        }
        spawns = spawns or (last_name(call.func) == "Process" and bool(started & {"spawn", "forkserver"}))
        if not spawns:
            continue
        if program.owner[call] is program.root:
            places = _runs_at_import(program, call, 0)
            if places is not None:
                yield Hit(places, "", _guard_edit(program, places))


def _runs_at_import(program: Program, node: ast.AST, depth: int) -> ast.AST | None:
    """The line of the file's top that leads here, under no main guard."""
    source = program.owner[node]
    if any(isinstance(each, ast.If) and "__name__" in ast.unparse(each.test) for each in above(source, node)):
        return None
    function = function_of(source, node)
    if function is None:
        return statement_of(source, node) if source is program.root else None
    for site in sites(program, function) if depth < 6 else []:
        found = _runs_at_import(program, site.call, depth + 1)
        if found is not None:
            return found
    return None


def _guard_edit(program: Program, node: ast.AST) -> tuple[Edit, ...]:
    """The guard above the file's last statement, where that is the one that spawns."""
    body = program.root.tree.body
    if isinstance(node, ast.Expr) and node is body[-1] and node.col_offset == 0 and node.end_lineno == node.lineno:
        return (insert(node.lineno, 0, 'if __name__ == "__main__":\n    '),)
    return ()


@rule(
    "LS315",
    "cuda-before-fork",
    "CUDA is used before the process is forked",
    result="RuntimeError in each child: cannot re-initialize CUDA in forked subprocess",
    why="a driver's state does not survive a fork",
    mend='mp.set_start_method("spawn")  # or touch no GPU before the children start',
)
def cuda_before_fork(program: Program) -> Iterator[Hit]:
    """A call of torch.cuda that starts the driver, above one that forks, or in a loader's workers."""
    if not program.named.get("get_context") and "multiprocessing_context" not in program.root.text:
        yield from (Hit(call, "in __getitem__, which workers run") for call in _workers_on_cuda(program))
    spawning = {
        constant(program, call.args[0] if call.args else None)
        for call in [*program.named.get("set_start_method", []), *program.named.get("get_context", [])]
    }
    forks = []
    for call in program.calls:
        name = qualified(program, call.func)
        method = constant(program, given(program, call, "start_method"))
        if (
            name == "os.fork"
            or (name.endswith("start_processes") and method == "fork")
            or (name.endswith("multiprocessing.Process") and not (spawning & {"spawn", "forkserver", ...}))
            or (last_name(call.func) == "Process" and "fork" in spawning)
            or (last_name(call.func) == "notebook_launcher" and name.startswith("accelerate"))
        ):
            forks.append(call)
    for fork in forks:
        source, function = program.owner[fork], function_of(program.owner[fork], fork)
        for call in program.calls:
            earlier = program.owner[call] is source and call.lineno < fork.lineno
            place = function_of(source, call) if earlier else fork
            if (
                earlier
                and (place is function or place is None)
                and _starts_cuda(program, call)
                and not per_child(program, call)
            ):
                yield Hit(call)
                return


def _workers_on_cuda(program: Program) -> Iterator[ast.Call]:
    """.cuda() in a data set's __getitem__, which a loader's forked workers run."""
    if not any(
        constant(program, each.value) not in (0, ...)
        for call in program.named.get("DataLoader", [])
        for each in call.keywords
        if each.arg == "num_workers"
    ):
        return
    for function in program.methods.get("__getitem__", []):
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and _starts_cuda(program, call):
                yield call


def _starts_cuda(program: Program, call: ast.Call) -> bool:
    name = qualified(program, call.func)
    if re.match(
        r"torch\.cuda\.(set_device|init|current_device|get_device_name|get_device_properties|synchronize|empty_cache"
        r"|memory_allocated|mem_get_info|manual_seed)",
        name,
    ):
        return not name.startswith("torch.cuda.manual_seed")
    if last_name(call.func) == "cuda" and isinstance(call.func, ast.Attribute) and not name:
        return True
    if last_name(call.func) == "to" and isinstance(call.func, ast.Attribute) and not name and call.args:
        return any(
            "cuda" in ast.unparse(each) and "cpu" not in ast.unparse(each) for each in origins(program, call.args[0])
        )
    return any(each.arg == "device" and str(constant(program, each.value)).startswith("cuda") for each in call.keywords)


def per_child(program: Program, call: ast.Call) -> bool:
    """Whether a line runs in the children."""
    return function_of(program.owner[call], call) is not None and per_rank(program, call)
