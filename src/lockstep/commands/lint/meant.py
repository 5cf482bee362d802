"""Names that a process's number, or the number of processes, goes by, whatever they are called.

The process group says it: what it is given as rank, what it returns, what spawn hands its function first, what it
starts as many of. What a name means, the parameters mean that all callers in the file give it for.
"""

import ast
from collections.abc import Iterator
from typing import cast

from lockstep.commands.lint.source import Binding, Function, Source, parameters
from lockstep.commands.lint.tree import text_of, walk

_TAKERS = ("init_process_group", "DistributedSampler")
_GIVEN = {"rank": "rank", "world_size": "world", "num_replicas": "world"}
_TOLD = {"get_rank": "rank", "get_world_size": "world"}
_FAR = 3  # calls that a number is handed on by


def mark(source: Source) -> Source:
    """Note at each such name in a file what it stands for: "rank" or "world", in its `meant`."""
    if not any(word in source.text for word in ("rank", "spawn", "world")):
        return source
    for node in source.of(ast.Call):
        name = _called(node)
        if name in _TAKERS:
            for keyword in node.keywords:
                if keyword.arg in _GIVEN and isinstance(keyword.value, ast.Name):
                    _note(source, keyword.value, _GIVEN[keyword.arg])
        elif name in ("spawn", "start_processes"):
            _spawned(source, node)
        elif name == "Process":
            _started(source, node)
        elif name in _TOLD:
            _kept(source, node)
    for _ in range(_FAR):
        if not _handed_on(source):
            break
    return source


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _bound(source: Source, name: ast.Name) -> tuple[ast.AST, list[Binding]]:
    """The scope that binds a name, and its bindings there."""
    scope = source.scopes[name]
    while name.id not in source.names.get(scope, {}) and not isinstance(scope, ast.Module):
        scope = source.scopes[scope]
    return scope, source.names.get(scope, {}).get(name.id, [])


def _note(source: Source, name: ast.Name, meaning: str) -> None:
    scope, found = _bound(source, name)
    if len(found) == 1 and isinstance(scope, Function):
        _note_all(scope, name.id, meaning)


def _note_all(function: Function, name: str, meaning: str) -> None:
    for node in walk(function):
        if isinstance(node, ast.Name) and node.id == name:
            node.__dict__["meant"] = meaning


def _kept(source: Source, call: ast.Call) -> None:
    """`n = dist.get_world_size()`, `self.n = dist.get_world_size()`, also in a tuple; bound once alone."""
    meaning, parent, value = _TOLD[_called(call)], source.parents[call], cast(ast.expr, call)
    if isinstance(parent, ast.Tuple):
        value, parent = parent, source.parents[parent]
    target = parent.targets[0] if isinstance(parent, ast.Assign) and parent.value is value else None
    if isinstance(value, ast.Tuple) and isinstance(target, ast.Tuple) and len(target.elts) == len(value.elts):
        target = target.elts[value.elts.index(call)]
    if isinstance(target, ast.Name):
        _note(source, target, meaning)
    elif isinstance(target, ast.Attribute) and len(source.attributes.get(text := text_of(target), [])) == 1:
        for node in source.of(ast.Attribute):
            if node.attr == target.attr and text_of(node) == text:
                node.__dict__["meant"] = meaning


def _handed_on(source: Source) -> bool:
    """Note the parameters of plain functions that all calls in the file give one meaning; whether one is new."""
    found: dict[tuple[Function, str], set[str]] = {}
    for call in source.of(ast.Call):
        function = _function(source, call.func)
        for place, name in enumerate(parameters(function)) if function is not None else ():
            given = _arguments(call, place, name.arg)
            meaning = given.__dict__.get("meant", _TOLD.get(_called(given), "")) if given is not None else ""
            if function is not None:
                found.setdefault((function, name.arg), set()).add(meaning)
    new = False
    for (taker, parameter), meanings in found.items():
        only = meanings.pop() if len(meanings) == 1 and len(source.names[taker][parameter]) == 1 else ""
        if only and not _noted(taker, parameter, only):
            _note_all(taker, parameter, only)
            new = True
    return new


def _noted(function: Function, name: str, meaning: str) -> bool:
    nodes = (each for each in walk(function) if isinstance(each, ast.Name) and each.id == name)
    return all(each.__dict__.get("meant") == meaning for each in nodes)


def _function(source: Source, node: ast.expr | None) -> Function | None:
    found = _bound(source, node)[1] if isinstance(node, ast.Name) else []
    only = found[0].node if len(found) == 1 else None
    return only if isinstance(only, Function) else None


def _arguments(call: ast.Call, place: int, *names: str) -> ast.expr | None:
    named = [each.value for each in call.keywords if each.arg in names]
    return named[0] if named else call.args[place] if 0 <= place < len(call.args) else None


def _spawned(source: Source, call: ast.Call) -> None:
    """mp.spawn(work, args=(n, options), nprocs=n)"""
    function = _function(source, _arguments(call, 0, "fn"))
    count, given = _arguments(call, 2, "nprocs"), _arguments(call, 1, "args")
    if function is None or not function.args.args:
        return
    names = [each.arg for each in parameters(function)]
    if len(source.names[function][names[0]]) == 1:
        _note_all(function, names[0], "rank")
    for name, value in zip(names[1:], given.elts if isinstance(given, ast.Tuple) else [], strict=False):
        if count is not None and not isinstance(count, ast.Constant) and text_of(value) == text_of(count):
            _note_all(function, name, "world")


def _started(source: Source, call: ast.Call) -> None:
    """`for rank in range(n): Process(target=work, args=(rank, n))`"""
    function, given = _function(source, _arguments(call, -1, "target")), _arguments(call, -1, "args")
    for place, value in enumerate(given.elts if function and isinstance(given, ast.Tuple) else []):
        turns = list(_turns(source, value)) if isinstance(value, ast.Name) else []
        if function is not None and turns and place < len(function.args.args):
            _note_all(function, function.args.args[place].arg, "rank")


def _turns(source: Source, name: ast.Name) -> Iterator[ast.AST]:
    """The loops that count a name: `for r in range(n)`, also in a comprehension."""
    for binding in _bound(source, name)[1]:
        if binding.kind == "item" and _called(binding.value or name) == "range" and not binding.path:
            yield binding.node
