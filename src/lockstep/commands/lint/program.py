"""A program: a file with the local modules that it imports; what names mean, and who calls which function."""

import ast
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

from lockstep.commands.lint.source import Binding, Function, Source, parse

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")
_MOST_FILES = 60  # of one program; past it, what is imported counts as a library


@dataclass(eq=False)
class Program:
    """The files that run together. `owner` finds a node's file; `memo` keeps what has been worked out."""

    root: Source
    sources: list[Source] = field(default_factory=list)
    memo: dict[object, object] = field(default_factory=dict)
    whole: bool = True  # False: there is more than _MOST_FILES, so that nothing can be said to be absent

    @cached_property
    def owner(self) -> dict[ast.AST, Source]:
        """The file of each node."""
        return {node: source for source in self.sources for node in source.nodes}

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, in the order of the files."""
        return [node for source in self.sources for node in source.nodes if isinstance(node, ast.Call)]

    @cached_property
    def named(self) -> dict[str, list[ast.Call]]:
        """The calls by the last part of what is called: `step` for `optimizer.step()`."""
        found: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            found.setdefault(last_name(call.func), []).append(call)
        return found

    @cached_property
    def methods(self) -> dict[str, list[Function]]:
        """The methods of local classes, by name."""
        found: dict[str, list[Function]] = {}
        for source in self.sources:
            for node in source.nodes:
                if isinstance(node, Function) and isinstance(source.parents[node], ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def modules(self) -> dict[Path, Source]:
        """The files by path."""
        return {source.path: source for source in self.sources}


def remembered(work: Callable[Concatenate[Program, _Given], _Found]) -> Callable[Concatenate[Program, _Given], _Found]:
    """A function of a program and of things in it, worked out once for each; its result is not to be changed."""

    @wraps(work)
    def known(program: Program, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        key: Hashable = (work, args, *kwargs.items())
        if key not in program.memo:
            program.memo[key] = work(program, *args, **kwargs)
        return cast(_Found, program.memo[key])

    return known


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, and of `a().c`; nothing for what has no name. What is imported under another name has its own."""
    match node:
        case ast.Name(id=name):
            return str(node.__dict__.get("imported", name))
        case ast.Attribute(attr=name):
            return name
    return ""


def load(path: Path, parsed: dict[Path, Source | None]) -> Program | None:
    """A file and what it imports from its own folders; None where the file is no Python."""
    root = _read(path.resolve(), parsed)
    if root is None:
        return None
    program, waiting, known = Program(root), [root.path], {root.path}
    while waiting and len(program.sources) < _MOST_FILES:
        source = _read(waiting.pop(0), parsed)
        if source is None:
            continue
        program.sources.append(source)
        for binding in _imports(source):
            for file in files_of(binding, source.path, root.path):
                if file not in known:
                    known.add(file)
                    waiting.append(file)
    program.whole = not waiting
    return program


def _read(path: Path, parsed: dict[Path, Source | None]) -> Source | None:
    if path not in parsed:
        try:
            parsed[path] = parse(path, path.read_text(encoding="utf-8-sig"))
        except (SyntaxError, ValueError, OSError, RecursionError):
            parsed[path] = None
    return parsed[path]


def _imports(source: Source) -> Iterator[Binding]:
    for names in source.names.values():
        for bindings in names.values():
            yield from (binding for binding in bindings if binding.kind == "import")


def files_of(binding: Binding, importer: Path, root: Path) -> list[Path]:
    """The local files that an import reads: the module's, and where `from package import module` names one, that."""
    module, _, name = binding.target.partition(":")
    parts = module.split(".") if module else []
    if binding.level:
        folders = [importer.parents[min(binding.level - 1, len(importer.parents) - 1)]]
    else:
        folders = list(dict.fromkeys([importer.parent, root.parent]))
    found = []
    for folder in folders:
        base = folder.joinpath(*parts)
        for file in (base.with_suffix(".py") if parts else base / "__init__.py", base / "__init__.py"):
            if file.is_file():
                found.append(file.resolve())
                break
        if name and (base / f"{name}.py").is_file():
            found.append((base / f"{name}.py").resolve())
        if found:
            break
    return found


def bindings(program: Program, node: ast.AST, name: str) -> list[Binding]:
    """All that a name may be bound to where the node stands, in the innermost scope that binds it."""
    source = program.owner[node]
    scope = source.scopes[node]
    first = True
    while True:
        if (first or not isinstance(scope, ast.ClassDef)) and name in source.names.get(scope, {}):
            return source.names[scope][name]
        if isinstance(scope, ast.Module):
            return []
        first, scope = False, source.scopes[scope]


def qualified(program: Program, node: ast.AST) -> str:
    """`torch.nn.functional.relu` for `F.relu`; `path/to/file.py:name` for what a local file defines; else nothing.

    A name that nothing binds is a builtin, and stands for itself.
    """
    key = ("qualified", node)
    if key not in program.memo:
        program.memo[key] = ""
        program.memo[key] = _qualified(program, node)
    found = program.memo[key]
    assert isinstance(found, str)
    return found


def _qualified(program: Program, node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            found = bindings(program, node, name)
            if not found:
                return name
            return _meaning(program, program.owner[node], name, found)
        case ast.Attribute(value=value, attr=attr):
            base = qualified(program, value)
            if base.endswith(".py"):
                return _exported(program, program.modules.get(Path(base)), attr)
            return f"{base}.{attr}" if base else ""
    return ""


def _meaning(program: Program, source: Source, name: str, found: list[Binding]) -> str:
    for binding in found:
        if binding.kind in ("def", "class"):
            return f"{source.path}:{name}"
        if binding.kind == "import":
            files = [file for file in files_of(binding, source.path, program.root.path) if file in program.modules]
            module, _, part = binding.target.partition(":")
            if not files:
                return f"{module}.{part}" if part else module
            if not part or files[-1].stem == part:
                return str(files[-1])
            return _exported(program, program.modules[files[0]], part)
    return ""


def _exported(program: Program, source: Source | None, name: str) -> str:
    if source is None or not (found := source.names.get(source.tree, {}).get(name)):
        return ""
    key = ("exported", source.path, name)
    if key in program.memo:
        return ""
    program.memo[key] = True
    meaning = _meaning(program, source, name, found)
    del program.memo[key]
    return meaning
