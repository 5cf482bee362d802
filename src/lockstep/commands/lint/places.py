"""Where a statement stands: in which loops, under which rank's condition, in training or in evaluation."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import called, callee, definition, lambdas, lineage, method
from lockstep.commands.lint.ddp import is_ddp
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import calls, walk, yields

LOADERS = ("DataLoader", "MultiEpochsDataLoader", "StatefulDataLoader", "create_loader", "auto_dataloader")


def loops(program: Program, node: ast.AST) -> list[list[Loop]]:
    """The loops around a place, from the inside out, one list for each way of calls that leads here."""
    return [path for path, _ in ways(program, node)]


def ways(program: Program, node: ast.AST, depth: int = 0) -> list[tuple[list[Loop], list[ast.expr]]]:
    """The loops around a place for each way of calls, and the conditions between it and the first of them."""
    source = program.owner[node]
    path: list[Loop] = []
    tests: list[ast.expr] = []
    inner, function = node, None
    for outer in above(source, node):
        if isinstance(outer, Loop) and inner in outer.body:
            path.append(outer)
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test and not path:
            tests.append(outer.test)
        if isinstance(outer, ast.ExceptHandler) and not path:
            tests.append(ast.Constant(value="except"))
        if isinstance(outer, Function | ast.Lambda):
            function = outer if isinstance(outer, Function) else None
            break
        inner = outer
    calls = [site.call for site in sites(program, function) if not site.spawned] if function else []
    if not calls or depth > 6:
        return [(path, tests)]
    found = []
    for call in calls[:6]:
        for rest, more in ways(program, call, depth + 1):
            found.append((path + rest, tests if path else tests + more))
    return found[:16]


@remembered
def inside(program: Program, node: ast.AST) -> list[ast.AST]:
    """All nodes within a statement, and within the local functions that it calls."""
    found, waiting, seen = [], [node], {node}
    while waiting:
        part = waiting.pop()
        found += walk(part)
        for each in calls(part):
            for function in [*called(program, each), *lambdas(program, each)]:
                if function not in seen:
                    seen.add(function)
                    waiting.append(function)
    return found


def calls_in(program: Program, node: ast.AST, *names: str) -> list[ast.Call]:
    """The calls of these names within a statement and the local functions that it calls."""
    return [each for each in inside(program, node) if isinstance(each, ast.Call) and last_name(each.func) in names]


def backwards(program: Program) -> list[ast.Call]:
    """The calls that run a backward pass: loss.backward(), accelerator.backward(loss), manual_backward(loss).

    And loss_scaler(loss, optimizer, ...) of timm and those who followed it, which does it all.
    """
    found = [*program.named.get("backward", []), *program.named.get("manual_backward", [])]
    scaled = [each for each in program.named.get("loss_scaler", []) if len(each.args) > 1]
    return [
        each
        for each in found
        if isinstance(each.func, ast.Attribute)
        and callee(program, each) is None  # a local method of that name: what it calls counts
        and not isinstance(definition(program, each.func.value), ast.ClassDef)
    ] + scaled


@remembered
def loaders_of(program: Program, loop: ast.AST) -> list[ast.Call]:
    """The calls that made the loaders which a loop runs over, through enumerate, tqdm, next() and the like."""
    waiting: list[ast.AST] = list(_drawn(loop))
    if isinstance(loop, ast.For | ast.AsyncFor | ast.comprehension):
        waiting.append(loop.iter)
    found, seen = [], set[ast.AST]()
    while waiting:
        node = waiting.pop()
        for made in origins(program, node):
            if isinstance(made, ast.Call) and made not in seen:
                seen.add(made)
                inner = definition(program, made.func)
                if last_name(made.func) in LOADERS:
                    found.append(made)
                elif inner is None or made is node or isinstance(inner, ast.ClassDef) or yields(inner):
                    waiting.extend(each for each in made.args if not isinstance(each, ast.Starred) and each is not node)
                    waiting.extend(each.value for each in made.keywords if each.arg in ("iterable", "loader"))
                    passed = method(program, inner, "__iter__") if isinstance(inner, ast.ClassDef) else inner
                    waiting.extend(_run_over(passed) if passed is not None else [])
    return list(dict.fromkeys(found))


def _drawn(loop: ast.AST) -> Iterator[ast.expr]:
    """x of next(x) in a loop that counts its passes: by range, or by while."""
    counts = isinstance(loop, ast.While) or (
        isinstance(loop, ast.For)
        and isinstance(loop.iter, ast.Call)
        and last_name(loop.iter.func) in ("range", "trange")
    )
    for node in walk(loop) if counts else []:
        match node:
            case ast.Call(func=ast.Name(id="next"), args=[source, *_]):
                yield source


def _run_over(generator: Function) -> Iterator[ast.expr]:
    """What a generator hands on: x of `for each in x: yield each`, of `yield from x`, and of `iter(x)`."""
    for node in walk(generator):
        match node:
            case ast.For(iter=source) if any(isinstance(each, ast.Yield) for each in walk(node)):
                yield source
            case ast.YieldFrom(value=source) | ast.Call(func=ast.Name(id="iter"), args=[source]):
                yield source


def over_loader(program: Program, loop: ast.AST) -> bool:
    """Whether a loop runs over batches, by what made them or by a name."""
    if loaders_of(program, loop):
        return True
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return False
    return any(
        re.search(r"loader|_dl$|^dl_|batches|iterator|prefetcher", last_name(each).lower())
        for each in walk(loop.iter)
        if last_name(each) not in ("range", "len") and not _counted(loop.iter, each)
    )


def _counted(whole: ast.expr, node: ast.AST) -> bool:
    """Whether a name stands in range(len(name)) only."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) in ("len", "range") and node in walk(each)
        for each in walk(whole)
    )


@remembered
def step_loops(program: Program) -> dict[Loop, list[Loop]]:
    """The loops over training batches -> the loops around each, from the inside out."""
    found: dict[Loop, list[Loop]] = {}
    for call in backwards(program):
        for path in loops(program, call):
            if path:
                place = next((n for n, loop in enumerate(path) if over_loader(program, loop)), 0)
                known = found.setdefault(path[place], [])
                known.extend(loop for loop in path[place + 1 :] if loop not in known)
    return found


@remembered
def evaluation_loops(program: Program) -> list[Loop]:
    """The loops over batches that call a model, and run no backward pass."""
    return list(_evaluation_loops(program))


def _evaluation_loops(program: Program) -> Iterator[Loop]:
    for source in program.sources:
        for node in source.loops:
            if over_loader(program, node) and not calls_in(
                program, node, "backward", "step", "zero_grad", "loss_scaler"
            ):
                nested = any(
                    isinstance(each, Loop) and each is not node and over_loader(program, each)
                    for each in inside(program, node)
                )
                if not nested and model_calls(program, node):
                    yield node


def collects(program: Program, loop: ast.AST) -> bool:
    """Whether a loop without backward fills a memory or draws features, by its function's name: it judges nothing."""
    function = function_of(program.owner[loop], loop)
    name = function.name.lower() if function is not None else ""
    called = model_calls(program, loop)
    if called and all(isinstance(program.owner[each].parents[each], ast.Expr) for each in called):
        return True  # what the model returns is dropped: it is batch norm's statistics that are wanted
    return bool(re.search(r"init|memory|bank|extract|feature|embed|cache|calibrat", name)) and not re.search(
        r"eval|test|valid", name
    )


def model_calls(program: Program, node: ast.AST) -> list[ast.Call]:
    """The calls of a model within a statement: of an object that is one, or is called so."""
    return [
        each
        for each in inside(program, node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Name | ast.Attribute)
        and each.args
        and _calls_model(program, each)
    ]


_MODEL = re.compile(r"(^|_)(model|net|network|ddp|classifier|backbone|resnet|wrapped|m)(_?\w*)?$")
_NO_MODEL = re.compile(r"loss|criter|norm|aug|mix|metric|transform|scal")


@remembered
def _calls_model(program: Program, call: ast.Call) -> bool:
    known = not qualified(program, call.func) and callee(program, call) is None
    if known and _MODEL.search(last_name(call.func).lower()):
        return True
    if not known and not isinstance(call.func, ast.Name):
        return False
    made = origins(program, call.func)
    if any(isinstance(each, ast.Call) and is_ddp(program, each) for each in made):
        return isinstance(call.func, ast.Name) or known
    return known and any(_made_as_model(program, each) for each in made)


@remembered
def _optimized(program: Program) -> set[ast.AST]:
    """What made the objects that somebody asks for their parameters, or wraps."""
    owners = [each.func.value for each in program.named.get("parameters", []) if isinstance(each.func, ast.Attribute)]
    found = {made for owner in owners for made in origins(program, owner)}
    ddp = [each for each in found if isinstance(each, ast.Call) and is_ddp(program, each)]
    return found | {made for call in ddp for inner in call.args[:1] for made in origins(program, inner)}


def _made_as_model(program: Program, made: ast.AST) -> bool:
    """x.module, a model of torchvision's or timm's, an object of a local class of modules."""
    if isinstance(made, ast.Attribute):
        return made.attr == "module"
    if not isinstance(made, ast.Call):
        return False
    owner = definition(program, made.func)
    if isinstance(owner, ast.ClassDef):
        bases = [last_name(base) for each in lineage(program, owner) for base in each.bases]
        return "Module" in bases and not _NO_MODEL.search(owner.name.lower()) and made in _optimized(program)
    if last_name(made.func) in ("AveragedModel", "ModelEmaV2", "ModelEmaV3", "DataParallel"):
        return True
    return bool(re.match(r"torchvision\.models\.|timm\.create_model$", qualified(program, made.func)))
