"""Rules about how processes start and meet: ports, addresses, the main guard, fork."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import sites
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_rank, per_rank
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Edit, Hit, insert, replace, rule
from lockstep.commands.lint.source import above, function_of, statement_of


@rule(
    "LS305",
    "fixed-port",
    "the port, the address or the meeting file is fixed",
    result="a second run on the same machine fails with address already in use, or meets the first one's processes; no "
    "second machine finds the first",
    why="the text gives each run the same meeting place, whatever the launcher says",
    mend='dist.init_process_group("nccl")  # under torchrun, which chooses\n'
    'os.environ.setdefault("MASTER_PORT", "29500")  # or: for one who has not chosen',
)
def fixed_port(program: Program) -> Iterator[Hit]:
    """MASTER_PORT set to a constant, an init_method with a constant port or file, under no question."""
    yield from _common_file(program)
    for source in program.sources:
        for text, bindings in source.attributes.items():
            if text in ("os.environ['MASTER_PORT']", "environ['MASTER_PORT']"):
                for binding in bindings:
                    port = binding.value
                    if isinstance(port, ast.expr) and _fixed(program, port) and not _asked(program, binding.node):
                        yield Hit(binding.node, "MASTER_PORT", _setdefault(binding.node, port))
    for call in program.named.get("update", []):
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        given_port = given(program, call, "MASTER_PORT")
        if given_port is None and call.args and isinstance(call.args[0], ast.Dict):
            entries = zip(call.args[0].keys, call.args[0].values, strict=True)
            given_port = next((v for k, v in entries if isinstance(k, ast.Constant) and k.value == "MASTER_PORT"), None)
        if owner.endswith("environ") and given_port is not None and _fixed(program, given_port):
            yield Hit(call, "MASTER_PORT")
    for call in program.calls:  # idist.Parallel(master_port=2222)
        chosen = constant(program, given(program, call, "master_port"))
        if isinstance(chosen, int) and chosen > 0:
            yield Hit(call, f"master_port={chosen}")
    for call in program.named.get("FileStore", []):
        place = constant(program, given(program, call, "file_name", 0))
        if isinstance(place, str) and place.startswith("/"):
            yield Hit(call, place)
    for call in program.named.get("TCPStore", []):
        number = constant(program, given(program, call, "port", 1))
        if isinstance(number, int) and number > 0:
            yield Hit(call, f"port {number}")
    started = [
        call for name in ("init_process_group", "Parallel", "initialize") for call in program.named.get(name, [])
    ]
    for call in started:
        method = given(program, call, "init_method", 1)
        place = constant(program, method)
        ends = method.values[-1] if isinstance(method, ast.JoinedStr) and method.values else None
        if isinstance(ends, ast.Constant) and re.search(r":[1-9]\d*$", str(ends.value)):
            yield Hit(call, f"port {str(ends.value).rpartition(':')[2]}")
        if isinstance(place, str) and method is not None and re.match(r"tcp://.*:[1-9]\d*$|file://", place):
            yield Hit(method, place)


def _common_file(program: Program) -> Iterator[Hit]:
    """torch.save of a name in the text to the folder for temporary files, which all runs of a machine share."""
    for call in program.named.get("save", []) if program.named.get("init_process_group") else []:
        path = given(program, call, "f", 1) if qualified(program, call.func) == "torch.save" else None
        for made in origins(program, path) if path is not None else []:
            text = ast.unparse(made)
            named = any(on_rank(program, each) for each in ast.walk(made) if isinstance(each, ast.Name))
            unique = re.search(r"getpid|uuid|mkdtemp|mkstemp|TemporaryDirectory|time\(|JOB_ID", text)
            joined = isinstance(made, ast.BinOp) or (isinstance(made, ast.Call) and last_name(made.func) == "join")
            common = (joined and "gettempdir()" in text) or (
                isinstance(made, ast.Constant) and text.startswith("'/tmp/")
            )
            if common and not named and not unique and not isinstance(made, ast.JoinedStr):
                yield Hit(made, "a name that all runs share")


def _fixed(program: Program, value: ast.expr) -> bool:
    """Whether a port is a number in the text, and no option's default."""
    found = constant(program, value)
    if isinstance(value, ast.Call) and last_name(value.func) == "str" and value.args:
        found = constant(program, value.args[0])
    return isinstance(found, str | int) and str(found) not in ("0", "") and not isinstance(found, bool)


def _asked(program: Program, node: ast.AST) -> bool:
    """Whether the line runs only where nothing has been set."""
    return any(
        isinstance(each, ast.If) and re.search(r"environ|MASTER|RANK|getenv", ast.unparse(each.test))
        for each in above(program.owner[node], node)
    )


def _setdefault(node: ast.AST, value: ast.expr) -> tuple[Edit, ...]:
    """`os.environ["X"] = y` -> `os.environ.setdefault("X", y)`."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
        target = node.targets[0]
        return (replace(node, f'{ast.unparse(target.value)}.setdefault("MASTER_PORT", {ast.unparse(value)})'),)
    return ()


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
