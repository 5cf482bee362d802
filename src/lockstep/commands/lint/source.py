"""A file of Python taken apart once: its tree, who stands in whom, and what each name is bound to.

The tree is the standard library's, whose nodes know their place to the column: mendings are edits of the text, so
comments and layout stay.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)

_NOQA = re.compile(r"#\s*noqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Binding:
    """A name is given a value: `path` leads into a tuple that is unpacked."""

    kind: str  # value item with param import def class aug
    node: ast.AST
    value: ast.AST | None = None
    path: tuple[int, ...] = ()
    target: str = ""  # an import's: module, or module:name
    level: int = 0


@dataclass(eq=False)
class Source:
    """A file's tree. `parents` and `scopes` hold each node's; `names` a scope's bindings in the order of the text."""

    path: Path
    text: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    scopes: dict[ast.AST, ast.AST] = field(default_factory=dict)
    nodes: list[ast.AST] = field(default_factory=list)
    names: dict[ast.AST, dict[str, list[Binding]]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)  # "self.x", "args.lr" -> what is assigned
    lines: list[str] = field(default_factory=list)


def parse(path: Path, text: str) -> Source:
    """Take a file apart. Raises SyntaxError or ValueError for what is no Python."""
    source = Source(path, text, ast.parse(text), lines=text.splitlines())
    _place(source, source.tree, source.tree)
    for node in source.nodes:
        _bind(source, node)
    _rename(source)
    return source


def _rename(source: Source) -> None:
    """Calls of `from torch.utils.data import DataLoader as Loader` keep the name it has where it comes from."""
    renamed = {}
    for name, found in source.names.get(source.tree, {}).items():
        real = found[0].target.rpartition(":")[2]
        if len(found) == 1 and found[0].kind == "import" and ":" in found[0].target and real != name:
            renamed[name] = real
    for node in source.nodes if renamed else []:
        if isinstance(node, ast.Call):
            for each in [node.func, *node.args[:1]]:
                if isinstance(each, ast.Name) and each.id in renamed:
                    each.__dict__["imported"] = renamed[each.id]


def _place(source: Source, top: ast.AST, scope: ast.AST) -> None:
    stack: list[tuple[ast.AST, ast.AST]] = [(top, scope)]
    source.scopes[top] = scope
    while stack:
        node, scope = stack.pop()
        source.nodes.append(node)
        inner = node if isinstance(node, SCOPES) else scope
        children = list(ast.iter_child_nodes(node))
        for child in children:
            source.parents[child] = node
            source.scopes[child] = inner
        stack.extend((child, inner) for child in reversed(children))


def _bind(source: Source, node: ast.AST) -> None:
    scope = source.scopes[node]
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                _target(source, scope, target, Binding("value", node, value))
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            _target(source, scope, target, Binding("value", node, value))
        case ast.AugAssign(target=target, value=value):
            _target(source, scope, target, Binding("aug", node, value))
        case ast.For(target=target) | ast.AsyncFor(target=target) | ast.comprehension(target=target):
            _target(source, scope, target, Binding("item", node, node.iter))
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            _target(source, scope, target, Binding("with", node, value))
        case ast.Import(names=names):
            for alias in names:
                name = alias.asname or alias.name.partition(".")[0]
                _add(source, scope, name, Binding("import", node, target=alias.name if alias.asname else name))
        case ast.ImportFrom(module=module, names=names, level=level):
            for alias in names:
                binding = Binding("import", node, target=f"{module or ''}:{alias.name}", level=level)
                _add(source, scope, alias.asname or alias.name, binding)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            _add(source, scope, name, Binding("def", node, node))
            _parameters(source, node)
        case ast.Lambda():
            _parameters(source, node)
        case ast.ClassDef(name=name):
            _add(source, scope, name, Binding("class", node, node))


def _parameters(source: Source, node: Function | ast.Lambda) -> None:
    for parameter in parameters(node):
        _add(source, node, parameter.arg, Binding("param", parameter, parameter))


def parameters(node: Function | ast.Lambda) -> list[ast.arg]:
    """Those with a name of their own, in order: positional ones first."""
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _target(source: Source, scope: ast.AST, target: ast.AST, binding: Binding) -> None:
    match target:
        case ast.Name(id=name):
            _add(source, _owner(source, scope, name), name, binding)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for number, part in enumerate(parts):
                inner = Binding(binding.kind, binding.node, binding.value, (*binding.path, number))
                _target(source, scope, part, inner)
        case ast.Attribute() | ast.Subscript():
            source.attributes.setdefault(ast.unparse(target), []).append(binding)


def _owner(source: Source, scope: ast.AST, name: str) -> ast.AST:
    if isinstance(scope, Function):
        for node in scope.body:
            if isinstance(node, ast.Global) and name in node.names:
                return source.tree
    return scope


def _add(source: Source, scope: ast.AST, name: str, binding: Binding) -> None:
    source.names.setdefault(scope, {}).setdefault(name, []).append(binding)


def above(source: Source, node: ast.AST) -> Iterator[ast.AST]:
    """Those that a node stands in, from the inside out, to the module."""
    while (parent := source.parents.get(node)) is not None:
        yield parent
        node = parent


def function_of(source: Source, node: ast.AST) -> Function | None:
    """The function that a node stands in."""
    for outer in above(source, node):
        if isinstance(outer, Function):
            return outer
    return None


def class_of(source: Source, node: ast.AST) -> ast.ClassDef | None:
    """The class that a node stands in."""
    return next((outer for outer in above(source, node) if isinstance(outer, ast.ClassDef)), None)


def statement_of(source: Source, node: ast.AST) -> ast.stmt:
    """The statement that a node is part of, or is."""
    while not isinstance(node, ast.stmt):
        node = source.parents[node]
    return node


def following(source: Source, node: ast.stmt) -> list[ast.stmt]:
    """The statements after one in its own block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(source.parents[node], name, None)
        if isinstance(block, list) and node in block:
            return block[block.index(node) + 1 :]
    return []


def silenced(source: Source, line: int, code: str) -> bool:
    """Whether a comment of the line says `noqa`, for all or for this code."""
    if not 1 <= line <= len(source.lines) or not (found := _NOQA.search(source.lines[line - 1])):
        return False
    codes = found["codes"]
    return not codes or code in {each.upper() for each in re.split(r"[,\s]+", codes)}
