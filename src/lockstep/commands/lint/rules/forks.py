"""The rule about what a fork doesn't survive: CUDA."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition, method
from lockstep.commands.lint.order import passed
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.roles import constant, given, loaders, of_loader
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.starting import methods
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of, walk


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
    if not methods(program) and not any("multiprocessing_context" in source.text for source in program.sources):
        yield from (Hit(call, where) for call, where in _workers_on_cuda(program))
    forks = _forks(program)
    if not forks:
        return
    started: ast.AST | None = None
    for step in passed(program, program.root.tree):
        if not isinstance(step.node, ast.Call):
            continue
        sure = all("cuda" in text_of(each).partition("\n")[0] for each in step.conditions)
        if started is None and sure and _starts_cuda(program, step.node):
            started = step.node
        if started is not None and step.node in forks:
            yield Hit(started)
            return


def _forks(program: Program) -> set[ast.AST]:
    """The calls that fork this process, and whose children use CUDA or may do so."""
    found: set[ast.AST] = set()
    ways = methods(program)
    anew = ways & {"spawn", "forkserver", ...}
    for call in program.calls:
        last, name = last_name(call.func), qualified(program, call.func)
        way = constant(program, given(program, call, "start_method"))
        pooled = name.endswith(("multiprocessing.Pool", "futures.ProcessPoolExecutor"))
        if (
            name == "os.fork"
            or (name.endswith("start_processes") and way == "fork")
            or (name.endswith("multiprocessing.Process") and not anew and _may_use_cuda(program, call))
            or (last == "Process" and "fork" in ways)
            or (pooled and not anew and _mapped_on_cuda(program))
            or (last == "notebook_launcher" and name.startswith("accelerate"))
        ):
            found.add(call)
    return found


def _may_use_cuda(program: Program, process: ast.Call) -> bool:
    """Whether a process runs what nobody knows, or something of torch."""
    target = given(program, process, "target", 1)
    run = definition(program, target) if target is not None else None
    return run is None or any(
        isinstance(each, ast.Call)
        and (last_name(each.func) in ("to", "cuda") or qualified(program, each.func).startswith("torch."))
        for each in inside(program, run)
    )


def _mapped_on_cuda(program: Program) -> bool:
    """Whether a function that a pool's processes run starts CUDA."""
    for name in ("map", "imap", "imap_unordered", "starmap", "apply", "apply_async", "map_async", "submit"):
        for call in program.named.get(name, []):
            run = definition(program, call.args[0]) if call.args else None
            if run is not None and any(
                isinstance(n, ast.Call) and _starts_cuda(program, n) for n in inside(program, run)
            ):
                return True
    return False


def _workers_on_cuda(program: Program) -> Iterator[tuple[ast.Call, str]]:
    """.cuda() in what a loader's forked workers run: __getitem__, collate_fn, a transform; or a data set's tensors."""
    forked = [
        loader
        for loader in loaders(program)
        if constant(program, of_loader(program, loader, "num_workers")) not in (0, ..., None)
    ]
    if not forked:
        return
    run: list[tuple[ast.AST, str]] = [(each, "__getitem__") for each in program.methods.get("__getitem__", [])]
    for call in program.named.get("Lambda", []):
        run += [(each, "a transform") for each in call.args if "transforms" in qualified(program, call.func)]
    run += [(each, "a transform") for each in _transforms(program)]
    for loader in forked:
        collate = given(program, loader, "collate_fn")
        for made in origins(program, collate) if collate is not None else []:
            filled = isinstance(made, ast.Call) and last_name(made.func) == "partial" and made.args
            each = made.args[0] if isinstance(made, ast.Call) and filled else made
            owner = definition(program, made.func) if isinstance(made, ast.Call) else None
            called = (
                method(program, owner, "__call__") if isinstance(owner, ast.ClassDef) else definition(program, each)
            )
            run.append((called or each, "collate_fn"))
    told = set[ast.AST]()
    for function, what in run:
        for node in walk(definition(program, function) or function):
            if isinstance(node, ast.Call) and _starts_cuda(program, node) and node not in told:
                told.add(node)
                yield node, f"in {what}, which workers run"
    yield from ((each, "what workers read is on the GPU") for each in _kept(program, forked) if each not in told)
    for loader in forked:
        for made in origins(program, data) if (data := of_loader(program, loader, "dataset")) is not None else []:
            if isinstance(made, ast.Call) and qualified(program, made.func) == "torch.utils.data.TensorDataset":
                moved = [move for each in made.args if (move := _move(program, each)) is not None]
                yield from ((each, "what workers read is on the GPU") for each in moved[:1] if each not in told)


def _transforms(program: Program) -> Iterator[Function]:
    """The __call__ or forward of local classes that stand in a Compose."""
    for call in program.named.get("Compose", []):
        for each in [one for part in call.args for one in walk(part) if isinstance(one, ast.Call)]:
            owner = definition(program, each.func)
            for name in ("__call__", "forward") if isinstance(owner, ast.ClassDef) else ():
                if isinstance(owner, ast.ClassDef) and (found := method(program, owner, name)) is not None:
                    yield found


def _kept(program: Program, forked: list[ast.Call]) -> Iterator[ast.Call]:
    """What a local data set moves to the GPU as it is made, and reads for each sample."""
    for loader in forked:
        data = of_loader(program, loader, "dataset")
        for made in origins(program, data) if data is not None else []:
            owner = definition(program, made.func) if isinstance(made, ast.Call) else None
            first = method(program, owner, "__init__") if isinstance(owner, ast.ClassDef) else None
            taken = method(program, owner, "__getitem__") if isinstance(owner, ast.ClassDef) else None
            if first is None or taken is None:
                continue
            read = {text_of(each) for each in walk(taken) if isinstance(each, ast.Attribute)}
            for each in walk(first):
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Call):
                    stored = any(text_of(target) in read for target in each.targets)
                    if stored and _starts_cuda(program, each.value) and not qualified(program, each.value.func):
                        yield each.value


def _move(program: Program, node: ast.expr) -> ast.Call | None:
    """The call that put a tensor on a GPU last."""
    if isinstance(node, ast.Call):
        return node if _starts_cuda(program, node) else None
    if isinstance(node, ast.Name):
        bound = reaching(program, node, bindings(program, node, node.id))
        if len(bound) == 1 and bound[0].kind == "value" and not bound[0].path and isinstance(bound[0].value, ast.Call):
            return _move(program, bound[0].value)
    return None


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
        return _is_gpu(program, call.args[0])
    return any(
        each.arg == "device" and name.startswith("torch.") and name != "torch.load" and _is_gpu(program, each.value)
        for each in call.keywords
    )


def _is_gpu(program: Program, node: ast.expr) -> bool:
    for made in origins(program, node):
        if isinstance(made, ast.Call) and qualified(program, made.func) == "torch.device" and made.args:
            if made.args[0] is not node and _is_gpu(program, made.args[0]):
                return True
        elif "cuda" in (text := text_of(made)) and "cpu" not in text:
            return True
    return False
