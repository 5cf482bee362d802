"""In which order a process comes by calls: from a file's top through the local functions and files that it runs."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.commands.lint.aliases import made_inside
from lockstep.commands.lint.calls import callee, definition, lineage, method, property_of
from lockstep.commands.lint.program import Program, files_of, remembered
from lockstep.commands.lint.source import Binding, Function, Source
from lockstep.commands.lint.tree import children, text_of, walk

Under = tuple[ast.AST, ...]  # conditions
_DEEPEST = 12  # calls within calls


@dataclass(frozen=True, eq=False)
class Step:
    """A call, or a name that is read, and the conditions above it, here and above the calls that lead here."""

    node: ast.AST
    conditions: Under


@dataclass(eq=False)
class _Walk:
    program: Program
    seen: set[tuple[ast.AST, bool]] = field(default_factory=set)


@dataclass(eq=False)
class _Frame:
    """A function that runs: `left` is set once a condition may have left it."""

    depth: int
    conditions: Under
    left: ast.AST | None = None


@remembered
def passed(program: Program, start: ast.AST) -> list[Step]:
    """The calls and names that a file's top, or a function, comes by, in order; a function's body once.

    What is spawned, or only named, is not entered.
    """
    way = _Walk(program)
    way.seen.add((start, True))
    body = start.body if isinstance(start, Function | ast.Module) else []
    return list(_block(way, body, _Frame(0, ()), ()))


def _block(way: _Walk, body: list[ast.stmt], frame: _Frame, under: Under) -> Iterator[Step]:
    for statement in body:
        yield from _statement(way, statement, frame, under)


def _statement(way: _Walk, node: ast.stmt, frame: _Frame, under: Under) -> Iterator[Step]:
    match node:
        case ast.If(test=test):
            yield from _expression(way, test, frame, under)
            inner = under if "__name__" in text_of(test) else (*under, test)
            yield from _block(way, node.body, frame, inner)
            yield from _block(way, node.orelse, frame, (*under, test))
        case ast.Try():
            yield from _block(way, node.body, frame, (*under, node) if _catches(node) else under)
            for handler in node.handlers:
                yield from _block(way, handler.body, frame, (*under, node))
            yield from _block(way, node.orelse, frame, under)
            yield from _block(way, node.finalbody, frame, under)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
                yield from _expression(way, part, frame, under)
        case ast.ClassDef():
            yield from _block(way, node.body, frame, under)
        case ast.Import() | ast.ImportFrom():
            yield from _import(way, node, frame, under)
        case ast.Return():
            if node.value is not None:
                yield from _expression(way, node.value, frame, under)
            if under:
                frame.left = under[-1]
        case ast.Assert():
            yield from _expression(way, node.test, frame, under)
        case _:
            for child in _in_order(node):
                if isinstance(child, ast.stmt):
                    yield from _statement(way, child, frame, under)
                elif isinstance(child, ast.withitem):
                    yield from _entered(way, child, frame, under)
                elif isinstance(child, ast.expr | ast.keyword):
                    yield from _expression(way, child, frame, under)
                elif isinstance(child, ast.match_case):
                    yield from _block(way, child.body, frame, (*under, child))


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        if node.value is not None:
            yield node.value
        return
    yield from children(node)


def _catches(node: ast.Try) -> bool:
    """Whether an error that torch raises may end in one of a try's handlers."""
    return any(
        each.type is None or text_of(each.type) not in ("KeyboardInterrupt", "SystemExit") for each in node.handlers
    )


def _import(way: _Walk, node: ast.Import | ast.ImportFrom, frame: _Frame, under: Under) -> Iterator[Step]:
    for source in _imported(way.program, node):
        if (source.tree, True) not in way.seen:
            way.seen.add((source.tree, True))
            yield from _block(way, source.tree.body, _Frame(frame.depth, frame.conditions), under)


def _imported(program: Program, node: ast.Import | ast.ImportFrom) -> Iterator[Source]:
    home = program.owner[node]
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            binding = Binding("import", node, target=f"{node.module or ''}:{alias.name}", level=node.level)
        else:
            binding = Binding("import", node, target=alias.name)
        for file in files_of(program, binding, home):
            if file in program.modules and program.modules[file] is not program.root:
                yield program.modules[file]


def _entered(way: _Walk, item: ast.withitem, frame: _Frame, under: Under) -> Iterator[Step]:
    """`with Group():` runs __enter__ as well."""
    yield from _expression(way, item.context_expr, frame, under)
    owner = definition(way.program, item.context_expr.func) if isinstance(item.context_expr, ast.Call) else None
    enters = method(way.program, owner, "__enter__") if isinstance(owner, ast.ClassDef) else None
    if enters is not None:
        yield from _run(way, enters, frame, under)


def _expression(way: _Walk, node: ast.AST, frame: _Frame, under: Under) -> Iterator[Step]:
    match node:
        case ast.Lambda():
            return
        case ast.IfExp(test=test):
            yield from _expression(way, test, frame, under)
            yield from _expression(way, node.body, frame, (*under, test))
            yield from _expression(way, node.orelse, frame, (*under, test))
        case ast.BoolOp(values=[first, *rest]):
            yield from _expression(way, first, frame, under)
            for each in rest:
                yield from _expression(way, each, frame, (*under, first))
        case ast.Call():
            if isinstance(node.func, ast.Attribute):
                yield from _expression(way, node.func.value, frame, under)
            for part in [*node.args, *node.keywords]:
                yield from _expression(way, part, frame, under)
            yield Step(node, _conditions(frame, under))
            for factory in _fields(way.program, node):
                yield from _factory(way, factory, frame, under)
            for function in _run_by(way.program, node):
                yield from _run(way, function, frame, under)
        case ast.Name() | ast.Attribute():
            if isinstance(node, ast.Attribute):
                yield from _expression(way, node.value, frame, under)
            yield Step(node, _conditions(frame, under))
            shown = property_of(way.program, node) if isinstance(node, ast.Attribute) else None
            if shown is not None:
                yield from _run(way, shown, frame, under)
        case _:
            for child in children(node):
                yield from _expression(way, child, frame, under)


def _run_by(program: Program, call: ast.Call) -> Iterator[Function]:
    """The local function that a call runs; of a dataclass what comes after its fields are set."""
    function = callee(program, call)
    if function is not None:
        yield function
    elif isinstance(owner := definition(program, call.func), ast.ClassDef):
        after = method(program, owner, "__post_init__")
        yield from [after] if after is not None else []


def _fields(program: Program, call: ast.Call) -> Iterator[ast.keyword]:
    """The default factories that the making of a dataclass's object runs: of the fields that the call doesn't give."""
    owner = definition(program, call.func)
    if not isinstance(owner, ast.ClassDef) or call.args or callee(program, call) is not None:
        return
    given = {each.arg for each in call.keywords}
    for field_ in [each for one in lineage(program, owner) for each in one.body if isinstance(each, ast.AnnAssign)]:
        match field_:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(keywords=keywords)) if not given & {name, None}:
                yield from (each for each in keywords if each.arg == "default_factory")


def _factory(way: _Walk, factory: ast.keyword, frame: _Frame, under: Under) -> Iterator[Step]:
    """What a default factory runs: a lambda's body, a local function; a library's stands for itself."""
    local = definition(way.program, factory.value)
    if isinstance(factory.value, ast.Lambda):
        yield from _expression(way, factory.value.body, frame, under)
    elif isinstance(local, Function):
        yield from _run(way, local, frame, under)
    else:
        yield Step(factory, _conditions(frame, under))


def _conditions(frame: _Frame, under: Under) -> Under:
    return (*frame.conditions, *under, *([frame.left] if frame.left is not None else []))


def _run(way: _Walk, function: Function, frame: _Frame, under: Under) -> Iterator[Step]:
    """The body of a function that is called here."""
    conditions = _conditions(frame, under)
    if frame.depth >= _DEEPEST or {(function, True), (function, not conditions)} & way.seen:
        return
    way.seen.add((function, not conditions))
    for decorator in function.decorator_list:
        local = definition(way.program, decorator.func if isinstance(decorator, ast.Call) else decorator)
        plain = isinstance(local, Function) and not isinstance(decorator, ast.Call)
        inner = made_inside(way.program, local) if plain and isinstance(local, Function) else None
        if inner is not None and (inner, not conditions) not in way.seen:  # it is called in the function's place
            way.seen.add((inner, not conditions))
            yield from _block(way, inner.body, _Frame(frame.depth + 1, conditions), ())
        elif local is not None:  # what stands around the function runs with it
            yield from (Step(each, (*conditions, local)) for each in walk(local) if isinstance(each, ast.Call))
    yield from _block(way, function.body, _Frame(frame.depth + 1, conditions), ())


@remembered
def _first(program: Program, start: ast.AST) -> dict[ast.AST, int]:
    """The calls that a start comes by -> their place in its order, the first one where there are several."""
    found: dict[ast.AST, int] = {}
    for place, step in enumerate(passed(program, start)):
        found.setdefault(step.node, place)
    return found


def before(program: Program, one: ast.AST, other: ast.AST) -> bool | None:
    """Whether a process comes by a call before another; None where no start comes by both."""
    starts = [program.root.tree, *(each for each in program.root.nodes if isinstance(each, Function))]
    for start in starts:
        known = _first(program, start)
        if one in known and other in known:
            return known[one] < known[other]
    return None
