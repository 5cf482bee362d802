"""Which local class a parameter's object is of, where no call gives it: self, an annotation, what runs a hook."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.dispatch import hooks_run, is_hook
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.source import Function


@remembered
def kinds(program: Program, parameter: ast.arg) -> list[ast.ClassDef]:
    """The local classes of what a parameter holds, as far as that can be told without a call that gives it."""
    source = program.owner[parameter]
    function = source.scopes[parameter]
    if not isinstance(function, Function):
        return []
    own = source.parents[function]
    given = [*function.args.posonlyargs, *function.args.args]
    first = bool(given) and given[0] is parameter
    if first and isinstance(own, ast.ClassDef):
        static = any(last_name(each) in ("staticmethod", "classmethod") for each in function.decorator_list)
        return [] if static else [own]
    said = _annotated(program, parameter)
    if said is not None:
        return [said]
    place = given.index(parameter) - 1 if parameter in given and isinstance(own, ast.ClassDef) else -1
    found = [_class_of_self(program, call, place) for call in _runs(program, function)] if place >= 0 else []
    return list(dict.fromkeys(each for each in found if each is not None))


def _annotated(program: Program, parameter: ast.arg) -> ast.ClassDef | None:
    """`run: Run`, `run: "Run"`, `run: Run | None`."""
    match parameter.annotation:
        case ast.Constant(value=str(text)) if text.isidentifier():
            known = program.owner[parameter].names.get(program.owner[parameter].tree, {}).get(text, [])
            found = next((each.value for each in known if isinstance(each.value, ast.ClassDef)), None)
            return found if isinstance(found, ast.ClassDef) else None
        case ast.BinOp(left=name, op=ast.BitOr()) | ast.Subscript(slice=name) | name:
            kind = definition(program, name) if isinstance(name, ast.Name | ast.Attribute) else None
            return kind if isinstance(kind, ast.ClassDef) else None


def _runs(program: Program, function: Function) -> Iterator[ast.Call]:
    """The calls that may run a hook: by its name, or by getattr."""
    if is_hook(program, function):
        yield from (call for call in program.named.get(function.name, []) if function in hooks_run(program, call))
        yield from _looked_up(program)


@remembered
def _looked_up(program: Program) -> list[ast.Call]:
    """getattr(hook, name)(...), and method(...) after method = getattr(hook, name)."""
    found = []
    for call in program.named.get("getattr", []):
        source = program.owner[call]
        parent = source.parents[call]
        if isinstance(parent, ast.Call) and parent.func is call:
            found.append(parent)
        elif isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            home = function_of(source, call)
            found += [
                each
                for each in program.named.get(parent.targets[0].id, [])
                if function_of(program.owner[each], each) is home and callee(program, each) is None
            ]
    return found


def _class_of_self(program: Program, call: ast.Call, place: int) -> ast.ClassDef | None:
    """The class whose method hands itself on at a place of a call."""
    if place >= len(call.args) or any(isinstance(each, ast.Starred) for each in call.args[: place + 1]):
        return None
    node = call.args[place]
    return class_of(program.owner[call], call) if isinstance(node, ast.Name) and node.id == "self" else None
