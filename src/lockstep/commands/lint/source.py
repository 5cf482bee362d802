"""A file of Python taken apart once: its tree, who stands in whom, and what each name is bound to.

The tree is the standard library's, whose nodes know their place to the column: mendings are edits of the text, so
comments and layout stay.
"""

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

from lockstep.commands.lint.tree import children, text_of

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)

_Node = TypeVar("_Node", bound=ast.AST)
_NOQA = re.compile(r"#\s*noqa\b(?::\s*(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)


@dataclass(eq=False, slots=True)  # frozen, a third of parse() would go into making them
class Binding:
    """A name is given a value: `path` leads into a tuple that is unpacked. Not to be changed."""

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
    unwritten: list[ast.AST] = field(default_factory=list)  # nodes that stand for what is left unsaid in the text
    lines: list[str] = field(default_factory=list)
    by_type: dict[type[ast.AST], list[ast.AST]] = field(default_factory=dict)
    kinds: dict[tuple[type[ast.AST], ...], list[ast.AST]] = field(default_factory=dict)

    def of(self, *kinds: type[_Node]) -> list[_Node]:
        """The nodes of these types in the order of `nodes`: found once for all rules that ask for the same."""
        if not self.by_type:
            for node in self.nodes:
                self.by_type.setdefault(type(node), []).append(node)
        if kinds not in self.kinds:
            known = [self.by_type[kind] for kind in kinds if kind in self.by_type]
            merged = (node for node in self.nodes if type(node) in kinds)
            self.kinds[kinds] = known[0] if len(known) == 1 else list(merged) if known else []
        return cast(list[_Node], self.kinds[kinds])

    @cached_property
    def imports(self) -> list[Binding]:
        """What the file imports, in all its scopes."""
        known = [each for names in self.names.values() for found in names.values() for each in found]
        return [each for each in known if each.kind == "import"]

    @cached_property
    def lower(self) -> str:
        """The text in small letters."""
        return self.text.lower()

    @property
    def loops(self) -> list[Loop]:
        """The file's loops."""
        return cast(list[Loop], self.of(ast.For, ast.AsyncFor, ast.While))

    @property
    def functions(self) -> list[Function]:
        """The file's functions and methods."""
        return cast(list[Function], self.of(ast.FunctionDef, ast.AsyncFunctionDef))


def parse(path: Path, text: str) -> Source:
    """Take a file apart. Raises SyntaxError or ValueError for what is no Python."""
    source = Source(path, text, ast.parse(text), lines=text.splitlines())
    _place(source, source.tree, source.tree)
    for node in source.nodes:
        if type(node) in _BINDING:
            _bind(source, node)
    return source


def _place(source: Source, top: ast.AST, scope: ast.AST) -> None:
    parents, scopes = source.parents, source.scopes
    stack: list[tuple[ast.AST, ast.AST]] = [(top, scope)]
    scopes[top] = scope
    while stack:
        node, scope = stack.pop()
        source.nodes.append(node)
        inner = node if isinstance(node, SCOPES) else scope
        for child in reversed(children(node)):
            parents[child] = node
            scopes[child] = inner
            stack.append((child, inner))


_BINDING = {
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem),
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
}


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
            star = next((number for number, part in enumerate(parts) if isinstance(part, ast.Starred)), len(parts))
            for number, part in enumerate(parts):
                place = number if number < star else number - len(parts)  # behind a star: from the end
                inner = Binding(binding.kind, binding.node, binding.value, (*binding.path, place))
                if not isinstance(part, ast.Starred):
                    _target(source, scope, part, inner)
                elif not binding.path and isinstance(binding.value, ast.expr) and binding.kind != "item":
                    rest = _rest(source, binding, binding.value, star, len(parts) - star - 1)
                    _target(source, scope, part.value, Binding(binding.kind, binding.node, rest))
        case ast.Attribute() | ast.Subscript():
            source.attributes.setdefault(text_of(target), []).append(binding)


def _rest(source: Source, binding: Binding, value: ast.expr, first: int, left: int) -> ast.expr:
    """`rest` of `a, *rest, b = value` as value[1:-1], which stands in no text."""
    piece = ast.Slice(ast.Constant(first), ast.Constant(-left) if left else None)
    rest = ast.copy_location(ast.Subscript(value, piece, ast.Load()), value)
    for node, parent in [(rest, binding.node), (piece, rest), *((each, piece) for each in children(piece))]:
        source.parents[node], source.scopes[node] = parent, source.scopes[binding.node]
        source.unwritten.append(node)
    return rest


def _owner(source: Source, scope: ast.AST, name: str) -> ast.AST:
    if isinstance(scope, Function):
        for node in scope.body:
            if isinstance(node, ast.Global) and name in node.names:
                return source.tree
    return scope


def _add(source: Source, scope: ast.AST, name: str, binding: Binding) -> None:
    source.names.setdefault(scope, {}).setdefault(name, []).append(binding)


def silenced(source: Source, line: int, code: str) -> bool:
    """Whether a comment of the line says `noqa`, for all or for this code."""
    if not 1 <= line <= len(source.lines) or not (found := _NOQA.search(source.lines[line - 1])):
        return False
    codes = found["codes"]
    return not codes or code in {each.upper() for each in re.split(r"[,\s]+", codes)}
