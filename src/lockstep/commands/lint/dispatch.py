"""Methods that are run by name: hooks and callbacks, whose caller doesn't know whose they are."""

import ast
import re

from lockstep.commands.lint.around import class_of
from lockstep.commands.lint.calls import callee, definition, instance_of
from lockstep.commands.lint.objects import made_of
from lockstep.commands.lint.program import Program, bindings, qualified, remembered
from lockstep.commands.lint.source import Function

_HOOK = re.compile(r"^(on|after|before|post|pre)_|_(end|start|begin|hook)$")


def makings(program: Program) -> dict[ast.ClassDef, list[ast.Call]]:
    """The local classes that the program makes objects of, and their local bases -> the calls that do."""
    return made_of(program, definition)


def hooks(program: Program, name: str) -> list[Function]:
    """The methods of a name whose class the program makes objects of."""
    return [each for each in program.methods.get(name, []) if _owner(program, each) in makings(program)]


def hooks_run(program: Program, call: ast.Call) -> list[Function]:
    """`hook.after_step(self)`: the methods of that name, where nothing says whose it is."""
    if not isinstance(call.func, ast.Attribute) or not _HOOK.search(call.func.attr):
        return []
    if not program.methods.get(call.func.attr) or qualified(program, call.func) or callee(program, call) is not None:
        return []
    return hooks(program, call.func.attr) if instance_of(program, call.func.value) is None else []


def is_hook(program: Program, function: Function) -> bool:
    """Whether a function is a method named like a hook, of a class that the program makes objects of."""
    owner = _owner(program, function)
    return owner is not None and owner in makings(program) and bool(_HOOK.search(function.name))


def runs_of(program: Program, function: Function) -> list[ast.AST]:
    """The places that run a hook: its name called on an object, or handed over as a text to what calls getattr."""
    if not is_hook(program, function):
        return []
    found: list[ast.AST] = [
        call for call in program.named.get(function.name, []) if function in hooks_run(program, call)
    ]
    return found + (_texts(program).get(function.name, []) if program.named.get("getattr") else [])


def handed_on(program: Program, function: Function) -> list[ast.AST]:
    """Where a function is registered to be run later: signal.signal(number, stop), trainer.on(event)."""
    found: list[ast.AST] = []
    for meaning, place in (("signal.signal", 1), ("atexit.register", 0)):
        for call in program.named.get(meaning.rpartition(".")[2], []):
            if qualified(program, call.func) == meaning and len(call.args) > place:
                given = call.args[place]
                named = isinstance(given, ast.Name) and any(
                    binding.value is function for binding in bindings(program, given, given.id)
                )
                if named or definition(program, given) is function:
                    found.append(call)
    for call in program.named.get("add_event_handler", []):
        if len(call.args) > 1 and definition(program, call.args[1]) is function:
            found.append(call)
    for each in function.decorator_list:
        event = isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "on"
        if event or qualified(program, each) == "atexit.register":
            found.append(function)
    return found


@remembered
def _texts(program: Program) -> dict[str, list[ast.AST]]:
    """The texts that calls are given by themselves -> these calls."""
    found: dict[str, list[ast.AST]] = {}
    for call in program.calls:
        for each in call.args:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                found.setdefault(each.value, []).append(call)
    return found


def _owner(program: Program, function: Function) -> ast.ClassDef | None:
    return class_of(program.owner[function], function)
