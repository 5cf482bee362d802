"""A program: a file with the local modules that it imports; what names mean, and who calls which function."""

import ast
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lockstep.commands.lint.meant import mark
from lockstep.commands.lint.renamed import rename
from lockstep.commands.lint.source import Binding, Function, Source, parse

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")
_MOST_FILES = 60  # of one program; past it, what is imported counts as a library


@dataclass(eq=False)
class Program:
    """The files that run together. `owner` finds a node's file; `memo` keeps what has been worked out."""

    root: Source
    sources: list[Source] = field(default_factory=list)
    memo: dict[object, Any] = field(default_factory=dict)
    meanings: dict[ast.AST, str] = field(default_factory=dict)  # what `qualified` has found
    made: dict[ast.AST, list[ast.AST]] = field(default_factory=dict)  # what `origins` has found
    cuts: int = 0  # how often `origins` went no further: what it found meanwhile holds for this way alone
    folders: dict[Path, frozenset[str]] = field(default_factory=dict)  # what stands in the folders asked for
    whole: bool = True  # False: there is more than _MOST_FILES, so that nothing can be said to be absent

    @cached_property
    def owner(self) -> dict[ast.AST, Source]:
        """The file of each node."""
        found: dict[ast.AST, Source] = {}
        for source in self.sources:
            found.update(dict.fromkeys([*source.nodes, *source.unwritten], source))
        return found

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls, in the order of the files."""
        return [node for source in self.sources for node in source.of(ast.Call)]

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
            for node in source.functions:
                if isinstance(source.parents[node], ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def named_files(self) -> dict[str, Source]:
        """The files by path, written out."""
        return {str(source.path): source for source in self.sources}

    @cached_property
    def modules(self) -> dict[Path, Source]:
        """The files by path."""
        return {source.path: source for source in self.sources}


def remembered(work: Callable[Concatenate[Program, _Given], _Found]) -> Callable[Concatenate[Program, _Given], _Found]:
    """A function of a program and of things in it, worked out once for each; its result is not to be changed."""

    @wraps(work)
    def known(program: Program, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        key: Hashable = (work, args, *kwargs.items()) if kwargs else (work, args)
        if key not in program.memo:
            program.memo[key] = work(program, *args, **kwargs)
        found: _Found = program.memo[key]
        return found

    return known


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, and of `a().c`; nothing for what has no name. What is imported under another name has its own."""
    known = node.__dict__  # a match statement here would be a twentieth of lint's time
    return known.get("imported") or known.get("id") or known.get("attr") or ""


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
        for binding in source.imports:
            for file in files_of(program, binding, source):
                if file not in known:
                    known.add(file)
                    waiting.append(file)
    program.whole = not waiting
    return program


def _read(path: Path, parsed: dict[Path, Source | None]) -> Source | None:
    if path not in parsed:
        try:
            parsed[path] = mark(rename(parse(path, path.read_text(encoding="utf-8-sig"))))
        except (SyntaxError, ValueError, OSError, RecursionError):
            parsed[path] = None
    return parsed[path]


def files_of(program: Program, binding: Binding, importer: Source) -> list[Path]:
    """The local files that an import reads: the module's, and where `from package import module` names one, that."""
    key = ("files", importer, binding.target, binding.level)
    if key not in program.memo:
        program.memo[key] = _files_of(program, binding, importer.path)
    found: list[Path] = program.memo[key]
    return found


def _files_of(program: Program, binding: Binding, importer: Path) -> list[Path]:
    module, _, name = binding.target.partition(":")
    parts = module.split(".") if module else []
    if binding.level:
        folders = [importer.parents[min(binding.level - 1, len(importer.parents) - 1)]]
    else:
        folders = list(dict.fromkeys([importer.parent, program.root.path.parent]))
    found = []
    for folder in folders:
        if parts and not {parts[0], f"{parts[0]}.py"} & _names_in(program, folder):
            continue  # a library's, as nearly all are
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


def _names_in(program: Program, folder: Path) -> frozenset[str]:
    if folder not in program.folders:
        try:
            program.folders[folder] = frozenset(each.name for each in folder.iterdir())
        except OSError:
            program.folders[folder] = frozenset()
    return program.folders[folder]


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
    found = program.meanings.get(node)
    if found is None:
        program.meanings[node] = ""
        found = program.meanings[node] = _qualified(program, node)
    return found


def _qualified(program: Program, node: ast.AST) -> str:
    if (other := node.__dict__.get("stands_for")) is not None:
        return qualified(program, other)  # make = partial(DataLoader, ...)
    match node:
        case ast.Name(id=name):
            found = bindings(program, node, name)
            if not found:
                return name
            key = ("meaning", found[0])  # one for all places that read the name
            if key not in program.memo:
                program.memo[key] = _meaning(program, program.owner[node], name, found)
            return str(program.memo[key])
        case ast.Attribute(value=value, attr=attr):
            base = qualified(program, value)
            if base.endswith(".py"):
                return _exported(program, program.named_files.get(base), attr)
            return f"{base}.{attr}" if base else ""
    return ""


def _meaning(program: Program, source: Source, name: str, found: list[Binding]) -> str:
    for binding in found:
        if binding.kind in ("def", "class"):
            return f"{source.path}:{name}"
        if binding.kind == "import":
            files = [file for file in files_of(program, binding, source) if file in program.modules]
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
