"""Calls of the project's functions, and starts of processes that run them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from lockstep_lint.facts.modules import LOOPS, Scope
from lockstep_lint.facts.tree import argument, keyword, last_name


@dataclass(frozen=True, slots=True)
class Site:
    """A call of a function of this project, or a start of a process that runs it."""

    call: ast.Call
    scope: Scope  # where the call stands
    positional: tuple[ast.expr | None, ...]  # by the function's parameters; None where not known
    keywords: dict[str, ast.expr]
    started: bool = False  # in a process of its own
    spawned: bool = False  # in several of them

    def argument(self, function: Scope, name: str) -> ast.expr | None:
        """What a parameter is given, or None."""
        if name in self.keywords:
            return self.keywords[name]
        position = function.params.index(name) if name in function.params else -1
        return self.positional[position] if 0 <= position < len(self.positional) else None


def call_site(call: ast.Call, scope: Scope, target: Scope) -> Site:
    """A call of a function of this project."""
    skipped = 1 if target.params[:1] in (["self"], ["cls"]) else 0
    return Site(call, scope, (None,) * skipped + _positional(call.args), _keywords(call))


def started_function(call: ast.Call) -> ast.expr | None:
    """The function that a call starts in a process, or hands on with arguments."""
    name = last_name(call.func)
    if name in ("spawn", "start_processes"):
        return argument(call, 0, "fn")
    if name in ("Process", "Thread"):
        return keyword(call, "target")
    parallel = name == "run" and "parallel" in last_name(getattr(call.func, "value", None)).lower()
    return (
        argument(call, 0, "func")
        if parallel or name in ("partial", "Parallel", "notebook_launcher", "launch")
        else None
    )


def start_site(call: ast.Call, scope: Scope) -> Site:
    """A start of a function in a process, or its arguments handed on."""
    name = last_name(call.func)
    if name == "partial":
        return Site(call, scope, _positional(call.args[1:]), _keywords(call))
    arguments = argument(call, 1, "args")
    given = _positional(arguments.elts) if isinstance(arguments, ast.Tuple) else ()
    if name == "run":
        given = _positional(call.args[1:])
    first: tuple[ast.expr | None, ...] = (None,) if name in ("spawn", "start_processes", "run") else ()
    several = name in ("spawn", "start_processes", "run", "notebook_launcher", "launch", "Parallel")
    repeats = (*LOOPS, ast.ListComp, ast.GeneratorExp)
    looped = name == "Process" and any(isinstance(parent, repeats) for _, parent in scope.module.ancestors(call))
    return Site(call, scope, first + given, {}, started=name != "Thread", spawned=several or looped)


def _positional(arguments: list[ast.expr]) -> tuple[ast.expr | None, ...]:
    known: list[ast.expr | None] = []
    for each in arguments:
        if isinstance(each, ast.Starred):
            break
        known.append(each)
    return tuple(known)


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {each.arg: each.value for each in call.keywords if each.arg}
