"""In which order a process comes by calls: from a file's top through the local functions and files that it runs."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.program import Program, files_of, remembered
from lockstep.commands.lint.source import Binding, Function, Source

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
    walk = _Walk(program)
    walk.seen.add((start, True))
    body = start.body if isinstance(start, Function | ast.Module) else []
    return list(_block(walk, body, _Frame(0, ()), ()))


def _block(walk: _Walk, body: list[ast.stmt], frame: _Frame, under: Under) -> Iterator[Step]:
    for statement in body:
        yield from _statement(walk, statement, frame, under)


def _statement(walk: _Walk, node: ast.stmt, frame: _Frame, under: Under) -> Iterator[Step]:
    match node:
        case ast.If(test=test):
            yield from _expression(walk, test, frame, under)
            inner = under if "__name__" in ast.unparse(test) else (*under, test)
            yield from _block(walk, node.body, frame, inner)
            yield from _block(walk, node.orelse, frame, (*under, test))
        case ast.Try():
            yield from _block(walk, node.body, frame, (*under, node) if _catches(node) else under)
            for handler in node.handlers:
                yield from _block(walk, handler.body, frame, (*under, node))
            yield from _block(walk, node.orelse, frame, under)
            yield from _block(walk, node.finalbody, frame, under)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            for part in [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]:
                yield from _expression(walk, part, frame, under)
        case ast.ClassDef():
            yield from _block(walk, node.body, frame, under)
        case ast.Import() | ast.ImportFrom():
            yield from _import(walk, node, frame, under)
        case ast.Return():
            if node.value is not None:
                yield from _expression(walk, node.value, frame, under)
            if under:
                frame.left = under[-1]
        case ast.Assert():
            yield from _expression(walk, node.test, frame, under)
        case _:
            for child in _in_order(node):
                if isinstance(child, ast.stmt):
                    yield from _statement(walk, child, frame, under)
                elif isinstance(child, ast.withitem):
                    yield from _entered(walk, child, frame, under)
                elif isinstance(child, ast.expr | ast.keyword):
                    yield from _expression(walk, child, frame, under)
                elif isinstance(child, ast.match_case):
                    yield from _block(walk, child.body, frame, (*under, child))


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        if node.value is not None:
            yield node.value
        return
    yield from ast.iter_child_nodes(node)


def _catches(node: ast.Try) -> bool:
    """Whether an error that torch raises may end in one of a try's handlers."""
    return any(
        each.type is None or ast.unparse(each.type) not in ("KeyboardInterrupt", "SystemExit") for each in node.handlers
    )


def _import(walk: _Walk, node: ast.Import | ast.ImportFrom, frame: _Frame, under: Under) -> Iterator[Step]:
    for source in _imported(walk.program, node):
        if (source.tree, True) not in walk.seen:
            walk.seen.add((source.tree, True))
            yield from _block(walk, source.tree.body, _Frame(frame.depth, frame.conditions), under)


def _imported(program: Program, node: ast.Import | ast.ImportFrom) -> Iterator[Source]:
    home = program.owner[node]
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            binding = Binding("import", node, target=f"{node.module or ''}:{alias.name}", level=node.level)
        else:
            binding = Binding("import", node, target=alias.name)
        for file in files_of(binding, home.path, program.root.path):
            if file in program.modules and program.modules[file] is not program.root:
                yield program.modules[file]


def _entered(walk: _Walk, item: ast.withitem, frame: _Frame, under: Under) -> Iterator[Step]:
    """`with Group():` runs __enter__ as well."""
    yield from _expression(walk, item.context_expr, frame, under)
    owner = definition(walk.program, item.context_expr.func) if isinstance(item.context_expr, ast.Call) else None
    enters = method(walk.program, owner, "__enter__") if isinstance(owner, ast.ClassDef) else None
    if enters is not None:
        yield from _run(walk, enters, frame, under)


def _expression(walk: _Walk, node: ast.AST, frame: _Frame, under: Under) -> Iterator[Step]:
    match node:
        case ast.Lambda():
            return
        case ast.IfExp(test=test):
            yield from _expression(walk, test, frame, under)
            yield from _expression(walk, node.body, frame, (*under, test))
            yield from _expression(walk, node.orelse, frame, (*under, test))
        case ast.BoolOp(values=[first, *rest]):
            yield from _expression(walk, first, frame, under)
            for each in rest:
                yield from _expression(walk, each, frame, (*under, first))
        case ast.Call():
            if isinstance(node.func, ast.Attribute):
                yield from _expression(walk, node.func.value, frame, under)
            for part in [*node.args, *node.keywords]:
                yield from _expression(walk, part, frame, under)
            yield Step(node, _conditions(frame, under))
            function = callee(walk.program, node)
            if function is not None:
                yield from _run(walk, function, frame, under)
        case ast.Name() | ast.Attribute():
            if isinstance(node, ast.Attribute):
                yield from _expression(walk, node.value, frame, under)
            yield Step(node, _conditions(frame, under))
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _expression(walk, child, frame, under)


def _conditions(frame: _Frame, under: Under) -> Under:
    return (*frame.conditions, *under, *([frame.left] if frame.left is not None else []))


def _run(walk: _Walk, function: Function, frame: _Frame, under: Under) -> Iterator[Step]:
    """The body of a function that is called here."""
    conditions = _conditions(frame, under)
    if frame.depth >= _DEEPEST or {(function, True), (function, not conditions)} & walk.seen:
        return
    walk.seen.add((function, not conditions))
    for decorator in function.decorator_list:
        local = definition(walk.program, decorator.func if isinstance(decorator, ast.Call) else decorator)
        if local is not None:  # what stands around the function runs with it
            yield from (Step(each, (*conditions, local)) for each in ast.walk(local) if isinstance(each, ast.Call))
    yield from _block(walk, function.body, _Frame(frame.depth + 1, conditions), ())
