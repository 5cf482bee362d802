"""A program: a file with the local modules that it imports; what names mean, and who calls which function."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lockstep.commands.lint.source import Binding, Function, Source, class_of, parameters, parse

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
        return {node: source for source in self.sources for node in source.nodes}

    @cached_property
    def calls(self) -> list[ast.Call]:
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
        found: dict[str, list[Function]] = {}
        for source in self.sources:
            for node in source.nodes:
                if isinstance(node, Function) and isinstance(source.parents[node], ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
        return found

    @cached_property
    def modules(self) -> dict[Path, Source]:
        return {source.path: source for source in self.sources}


def last_name(node: ast.AST) -> str:
    """`c` of `a.b.c`, and of `a().c`; nothing for what has no name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
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


def definition(program: Program, node: ast.AST) -> Function | ast.ClassDef | None:
    """The local function or class that a name means."""
    path, colon, name = qualified(program, node).partition(":")
    if not colon:
        return None
    source = program.modules.get(Path(path))
    for binding in source.names.get(source.tree, {}).get(name, []) if source else []:
        if isinstance(binding.value, Function | ast.ClassDef):
            return binding.value
    for binding in bindings(program, node, name) if node in program.owner else []:
        if isinstance(binding.value, Function | ast.ClassDef):
            return binding.value
    return None


def method(program: Program, owner: ast.ClassDef, name: str, depth: int = 0) -> Function | None:
    """A local class's method, its own or a local base's."""
    for node in owner.body:
        if isinstance(node, Function) and node.name == name:
            return node
    for base in owner.bases if depth < 5 else []:
        above = definition(program, base)
        if isinstance(above, ast.ClassDef) and (found := method(program, above, name, depth + 1)):
            return found
    return None


_COMMON = {"train", "eval", "backward", "apply", "size", "split", "item", "mean", "sum", "all_reduce", "barrier", "forward", "step", "to", "cuda", "update", "reset", "load", "save", "close", "log", "print",
           "get", "add", "items", "state_dict", "load_state_dict", "zero_grad", "set_epoch", "append", "write"}  # fmt: skip


def callee(program: Program, call: ast.Call) -> Function | None:
    """The local function that a call runs; a class's is its __init__."""
    found = definition(program, call.func)
    if isinstance(found, ast.ClassDef):
        return method(program, found, "__init__")
    if found is not None:
        return found
    if isinstance(call.func, ast.Attribute):
        own = class_of(program.owner[call], call)
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "self" and own:
            return method(program, own, call.func.attr)
        known = program.methods.get(call.func.attr, [])
        if len(known) == 1 and call.func.attr not in _COMMON and not qualified(program, call.func):
            return known[0]
    return None


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a function is started; `offset`: parameters that the call itself fills (self; a spawned rank)."""

    call: ast.Call
    function: Function
    arguments: list[ast.expr]
    offset: int
    spawned: bool = False


def sites(program: Program, function: Function) -> list[Site]:
    """Where a function is called, or started in other processes."""
    if "sites" not in program.memo:
        found: dict[Function, list[Site]] = {}
        for call in program.calls:
            for site in _sites(program, call):
                found.setdefault(site.function, []).append(site)
        program.memo["sites"] = found
    known = program.memo["sites"]
    assert isinstance(known, dict)
    result: list[Site] = known.get(function, [])
    return result


def _sites(program: Program, call: ast.Call) -> Iterator[Site]:
    function = callee(program, call)
    if function is not None:
        bound = isinstance(program.owner[function].parents[function], ast.ClassDef)
        static = any(last_name(each) == "staticmethod" for each in function.decorator_list)
        yield Site(call, function, list(call.args), int(bound and not static))
    name = last_name(call.func)
    keywords = {each.arg: each.value for each in call.keywords}
    target = keywords.get("target") or keywords.get("fn") or (call.args[0] if call.args else None)
    if name in ("spawn", "start_processes", "Process", "Thread", "notebook_launcher", "run", "launch") and target:
        started = definition(program, target)
        if isinstance(started, Function):
            given = keywords.get("args") or (call.args[1] if len(call.args) > 1 and name != "Process" else None)
            arguments = list(given.elts) if isinstance(given, ast.Tuple | ast.List) else []
            yield Site(call, started, arguments, int(name in ("spawn", "start_processes")), name != "Thread")


def argument(site: Site, parameter: str) -> ast.expr | None:
    """What a call gives for a parameter: None where that is the default, or can't be told."""
    if not site.spawned:
        for keyword in site.call.keywords:
            if keyword.arg == parameter:
                return keyword.value
    names = [each.arg for each in parameters(site.function)]
    if parameter not in names:
        return None
    place = names.index(parameter) - site.offset
    if 0 <= place < len(site.arguments) and not any(isinstance(a, ast.Starred) for a in site.arguments[: place + 1]):
        return site.arguments[place]
    return None


def default(function: Function, parameter: str) -> ast.expr | None:
    """The default of a parameter, where it has one."""
    positional = [*function.args.posonlyargs, *function.args.args]
    for each, value in zip(reversed(positional), reversed(function.args.defaults), strict=False):
        if each.arg == parameter:
            return value
    for each, other in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if each.arg == parameter:
            return other
    return None
