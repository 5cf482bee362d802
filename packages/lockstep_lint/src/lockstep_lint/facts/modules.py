"""The names of one file: its scopes, what is bound in them, its imports and its calls; and the files of a project."""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep_lint.facts.tree import children, dotted_name, last_name, place

if TYPE_CHECKING:
    from lockstep_lint.facts.program import Links

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
OPENING = frozenset([*FUNCTIONS, ast.ClassDef])
LEAVES = frozenset([ast.Name, ast.Constant, ast.Pass, ast.Break, ast.Continue, ast.alias])
ASSIGNING = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.AugAssign, ast.comprehension, ast.withitem)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
RECORDED = frozenset(
    [*ASSIGNING, *LOOPS, ast.Call, ast.Return, ast.If, ast.IfExp, ast.Import, ast.ImportFrom, ast.Global]
)
LARGEST = 1_000_000  # bytes of a file that is read
CONFIG = frozenset(  # what objects are called that hold settings
    "_c args arguments cfg config configs conf flags hparams hp hyp opt option options opts params".split()
)
MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # a folder that has one is a project's


def names_settings(base: ast.expr) -> bool:
    """Whether a name is that of an object with settings: `args`, `config.TRAIN`, `self.cfg`."""
    return any(each.lower() in CONFIG for each in dotted_name(base).split("."))


class Unreadable(Exception):
    """A file that can't be read as Python; the message says why."""


@dataclass(frozen=True, slots=True)
class Import:
    """What an import binds: a module, or a name of a module."""

    module: str
    name: str | None = None
    level: int = 0  # dots before the module

    @property
    def dotted(self) -> str:
        """The name in full, as written: `torch.nn.parallel.DistributedDataParallel`."""
        return f"{self.module}.{self.name}".strip(".") if self.name else self.module


@dataclass(frozen=True, slots=True)
class Binding:
    """One assignment to a name or an attribute."""

    value: ast.expr | None
    node: ast.AST  # the statement
    scope: Scope
    kind: str = "assign"  # or loop, with, augmented, item (x[...] = value)
    index: int | None = None  # the element of the value, where a tuple is unpacked

    @property
    def line(self) -> int:
        """The line of the statement, from 1."""
        return getattr(self.node, "lineno", 0)


@dataclass(eq=False, slots=True, repr=False)
class Scope:
    """A function, a class or a file, with the names that are bound in it."""

    node: ast.AST
    module: Module
    outer: Scope | None
    name: str = ""
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)  # of a class: what `self.x` is set to
    inner: dict[str, Scope] = field(default_factory=dict)  # functions and classes that are defined in it
    nested: list[Scope] = field(default_factory=list)  # these, and lambdas
    calls: list[ast.Call] = field(default_factory=list)  # without those of inner functions
    loops: list[ast.For | ast.AsyncFor | ast.While] = field(default_factory=list)
    tests: list[ast.expr] = field(default_factory=list)  # of if, while and conditional expressions
    returns: list[ast.expr] = field(default_factory=list)
    params: list[str] = field(default_factory=list)
    defaults: dict[str, ast.expr] = field(default_factory=dict)

    @property
    def is_class(self) -> bool:
        """Whether it is a class."""
        return isinstance(self.node, ast.ClassDef)

    @property
    def is_function(self) -> bool:
        """Whether it is a function or a lambda."""
        return isinstance(self.node, FUNCTIONS)

    @property
    def is_property(self) -> bool:
        """Whether it is a method that is read like an attribute."""
        return any("property" in last_name(each) for each in getattr(self.node, "decorator_list", []))

    @property
    def owner(self) -> Scope | None:
        """The class whose method this, or the function around it, is."""
        scope = self.outer
        while scope is not None and not scope.is_class:
            scope = scope.outer
        return scope

    def lookup(self, name: str) -> Scope | None:
        """The scope that binds a name as seen from here, by the rules of Python."""
        scope: Scope | None = self
        while scope is not None:
            if (scope is self or not scope.is_class) and (
                name in scope.bindings or name in scope.params or name in scope.inner
            ):
                return scope
            scope = scope.outer
        return None


class Module:
    """One file, read and indexed."""

    def __init__(self, path: Path, shown: str, text: str) -> None:
        self.path = path
        self.shown = shown  # the path as it is printed
        self.text = text
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise Unreadable(f"line {error.lineno}: {error.msg}") from None
        except ValueError as error:
            raise Unreadable(str(error)) from None
        except (RecursionError, MemoryError):
            raise Unreadable("it is nested too deeply") from None
        self.scope = Scope(self.tree, self, None, "")
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {self.tree: self.scope}
        self.imports: dict[str, Import] = {}
        self.stars: list[Import] = []
        self.stores: dict[str, list[Binding]] = {}  # what attributes of a configuration are set to: `args.rank = ...`
        self._said: dict[str, bool] = {}
        self.runs = False  # whether it does something when it is started
        try:
            self._index()
        except RecursionError:
            raise Unreadable("it is nested too deeply") from None

    @cached_property
    def lines(self) -> list[str]:
        """Its lines, as ast counts them."""
        return re.split(r"\r\n|\r|\n", self.text)

    def says(self, pattern: str) -> bool:
        """Whether a regular expression is found in its text."""
        if pattern not in self._said:
            self._said[pattern] = re.search(pattern, self.text) is not None
        return self._said[pattern]

    @cached_property
    def methods(self) -> dict[str, list[Scope]]:
        """The methods of its classes, by name."""
        found: dict[str, list[Scope]] = {}
        for scope in self.scopes.values():
            if scope.is_function and scope.outer and scope.outer.is_class:
                found.setdefault(scope.name, []).append(scope)
        return found

    @cached_property
    def options(self) -> list[ast.Call]:
        """The calls of add_argument."""
        if "add_argument" not in self.text:
            return []
        return [call for scope in self.scopes.values() for call in scope.calls if last_name(call) == "add_argument"]

    def behind_main(self, node: ast.AST) -> bool:
        """Whether a line of the file itself runs only where it is started as a script."""
        line = getattr(node, "lineno", 0)
        return any(first <= line <= last for first, last in self.main_lines)

    def scope_of(self, node: ast.AST) -> Scope:
        """The innermost function, class or file around a node."""
        while (parent := self.parents.get(node)) is not None:
            node = parent
            if node in self.scopes:
                return self.scopes[node]
        return self.scope

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs (child, parent) from a node up to its function or file, which is the last parent."""
        while (parent := self.parents.get(node)) is not None:
            yield node, parent
            if parent in self.scopes:
                return
            node = parent

    def _index(self) -> None:
        stack: list[tuple[ast.AST, Scope]] = [(self.tree, self.scope)]
        shared: list[tuple[Scope, list[str]]] = []
        parents = self.parents
        while stack:
            node, scope = stack.pop()
            for child in children(node):
                parents[child] = node
                kind = type(child)
                if kind in LEAVES:
                    continue
                if kind in OPENING:
                    stack.append((child, self._open(child, scope)))
                    continue
                if kind in RECORDED:
                    if isinstance(child, ast.Global):
                        shared.append((scope, child.names))
                    self._record(child, scope)
                stack.append((child, scope))
        for scope in self.scopes.values():
            scope.calls.sort(key=place)
            for bindings in (*scope.bindings.values(), *scope.attributes.values()):
                bindings.sort(key=lambda binding: binding.line)
        for scope, names in shared:
            for name in names:
                self.scope.bindings.setdefault(name, []).extend(scope.bindings.pop(name, []))
        self.main_lines = [
            (each.lineno, each.end_lineno or each.lineno)
            for each in self.tree.body
            if isinstance(each, ast.If)
            and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(each.test))
        ]
        self.runs = bool(self.main_lines) or any(
            isinstance(statement, (ast.For, ast.While, ast.With))
            or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call))
            for statement in self.tree.body
        )

    def _open(self, node: ast.AST, outer: Scope) -> Scope:
        name = getattr(node, "name", "<lambda>")
        scope = Scope(node, self, outer, name)
        self.scopes[node] = scope
        outer.nested.append(scope)
        if not isinstance(node, ast.Lambda):
            outer.inner[name] = scope
        if isinstance(node, FUNCTIONS):
            arguments = node.args
            ordered = [*arguments.posonlyargs, *arguments.args]
            scope.params = [each.arg for each in (*ordered, *arguments.kwonlyargs)]
            if arguments.defaults:
                for each, value in zip(ordered[-len(arguments.defaults) :], arguments.defaults, strict=True):
                    scope.defaults[each.arg] = value
            for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                if default is not None:
                    scope.defaults[each.arg] = default
            if isinstance(node, ast.Lambda):
                scope.returns.append(node.body)
        return scope

    def _record(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, LOOPS):
            scope.loops.append(node)
        match node:
            case ast.Call():
                scope.calls.append(node)
            case ast.If(test=test) | ast.IfExp(test=test):
                scope.tests.append(test)
            case ast.Return(value=ast.expr() as value):
                scope.returns.append(value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value, node, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, value, node, scope)
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value, node, scope)
            case ast.AugAssign(target=target, value=value):
                self._bind(target, value, node, scope, "augmented")
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                self._bind(target, value, node, scope, "loop")
            case ast.comprehension(target=target, iter=value):
                self._bind(target, value, value, scope, "loop")
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._bind(target, value, value, scope, "with")
            case ast.Import(names=names):
                for alias in names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.imports[bound] = Import(alias.name if alias.asname else bound)
                    if not alias.asname:
                        self.imports.setdefault(alias.name, Import(alias.name))
            case ast.ImportFrom(module=source, names=names, level=level):
                for alias in names:
                    if alias.name == "*":
                        self.stars.append(Import(source or "", None, level))
                    else:
                        self.imports[alias.asname or alias.name] = Import(source or "", alias.name, level)

    def _bind(
        self,
        target: ast.expr,
        value: ast.expr,
        node: ast.AST,
        scope: Scope,
        kind: str = "assign",
        index: int | None = None,
    ) -> None:
        match target:
            case ast.Name(id=name):
                scope.bindings.setdefault(name, []).append(Binding(value, node, scope, kind, index))
            case ast.Attribute(value=base, attr=attribute):
                if isinstance(base, ast.Name) and base.id in ("self", "cls") and (owner := scope.owner):
                    owner.attributes.setdefault(attribute, []).append(Binding(value, node, scope, kind, index))
                elif names_settings(base):
                    self.stores.setdefault(attribute, []).append(Binding(value, node, scope, kind, index))
            case ast.Subscript(value=ast.Name(id=name)):
                scope.bindings.setdefault(name, []).append(Binding(value, node, scope, "item", index))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                pairs = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(parts) and kind == "assign"
                for number, part in enumerate(parts):
                    if pairs and isinstance(value, (ast.Tuple, ast.List)):
                        self._bind(part, value.elts[number], node, scope, kind)
                    else:
                        self._bind(part, value, node, scope, kind, number)
            case ast.Starred(value=part):
                self._bind(part, value, node, scope, "loop")


class Project:
    """The files that are linted and the local modules that they import, each read once."""

    def __init__(self, bounds: list[Path]) -> None:
        self.bounds = bounds  # imports are looked for no higher than here
        self.modules: dict[Path, Module | None] = {}
        self.targets: dict[ast.expr, Scope | None] = {}  # the function or class that a name means, where it is known
        self.links: dict[Scope, Links] = {}  # where each function leads, as far as all programs see it alike
        self.notes: dict[str, str] = {}  # path -> why it was not read
        self._listed: dict[Path, frozenset[str]] = {}
        self._imported: dict[Module, list[Module]] = {}
        self._found: dict[tuple[Path, str, int], Module | None] = {}

    def load(self, path: Path, shown: str | None = None) -> Module | None:
        """The module of a path, or None with a note where it can't be read."""
        path = Path(os.path.abspath(path))
        if path not in self.modules:
            shown = shown or os.path.relpath(path)
            try:
                self.modules[path] = Module(path, shown, read(path))
            except Unreadable as error:
                self.modules[path] = None
                self.notes[shown] = str(error)
        return self.modules[path]

    def find(self, importer: Module, dotted: str, level: int = 0) -> Module | None:
        """The local file of a module name, as one file imports it; None if it is not of this project."""
        key = (importer.path.parent, dotted, level)
        if key not in self._found:
            self._found[key] = self._find(importer, dotted, level)
        return self._found[key]

    def _find(self, importer: Module, dotted: str, level: int) -> Module | None:
        parts = dotted.split(".") if dotted else []
        if level:
            folder = importer.path.parent
            for _ in range(level - 1):
                folder = folder.parent
            return self._module_in(folder, parts)
        for folder in self._search(importer.path.parent):
            if found := self._module_in(folder, parts):
                return found
        return None

    def _search(self, folder: Path) -> Iterator[Path]:
        """Where Python may look: the file's folder, and those above it up to the project's."""
        while True:
            yield folder
            if "src" in self._names(folder):
                yield folder / "src"
            if folder in self.bounds or folder.parent == folder or any(mark in self._names(folder) for mark in MARKS):
                return
            folder = folder.parent

    def _names(self, folder: Path) -> frozenset[str]:
        if folder not in self._listed:
            try:
                self._listed[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._listed[folder] = frozenset()  # no rights, or no folder: it has no modules for us
        return self._listed[folder]

    def _module_in(self, folder: Path, parts: list[str]) -> Module | None:
        if not parts:
            return self.load(folder / "__init__.py") if "__init__.py" in self._names(folder) else None
        for part in parts[:-1]:
            if part not in self._names(folder):
                return None
            folder = folder / part
        if f"{parts[-1]}.py" in self._names(folder):
            return self.load(folder / f"{parts[-1]}.py")
        inside = folder / parts[-1]
        if parts[-1] in self._names(folder) and "__init__.py" in self._names(inside):
            return self.load(inside / "__init__.py")
        return None

    def imported(self, module: Module) -> Iterator[Module]:
        """The local modules that a file imports."""
        for entry in (*module.imports.values(), *module.stars):
            if entry.name and (found := self.find(module, f"{entry.module}.{entry.name}".strip("."), entry.level)):
                yield found
            if found := self.find(module, entry.module, entry.level):
                yield found

    def closure(self, root: Module) -> list[Module]:
        """A file and all local modules that it imports, directly or not."""
        found = {root: None}
        queue = [root]
        while queue:
            module = queue.pop(0)
            if module not in self._imported:
                self._imported[module] = list(self.imported(module))
            for each in self._imported[module]:
                if each not in found:
                    found[each] = None
                    queue.append(each)
        return list(found)

    def target(self, module: Module, name: str, depth: int = 4) -> Scope | Module | None:
        """What a name of a file is, where that is a function, a class or a module of this project."""
        if name in module.scope.inner:
            return module.scope.inner[name]
        if depth == 0:
            return None
        if entry := module.imports.get(name):
            if not entry.name:
                return self.find(module, entry.module, entry.level)
            if found := self.find(module, f"{entry.module}.{entry.name}".strip("."), entry.level):
                return found
            source = self.find(module, entry.module, entry.level)
            return self.target(source, entry.name, depth - 1) if source else None
        for star in module.stars:
            source = self.find(module, star.module, star.level)
            if source and source is not module and (result := self.target(source, name, depth - 1)):
                return result
        return None


def read(path: Path) -> str:
    """The text of a Python file in the encoding that it declares."""
    try:
        if not path.is_file():
            raise Unreadable("it is not a file")
        if path.stat().st_size > LARGEST:
            raise Unreadable(f"it has more than {LARGEST:,} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    try:
        return data.decode(tokenize.detect_encoding(io.BytesIO(data).readline)[0])
    except (SyntaxError, UnicodeDecodeError, LookupError):
        raise Unreadable("it is not UTF-8, and no encoding that it declares fits") from None
