"""States that a checkpoint holds and that a run which goes on from it never takes out again."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.parties import roles
from lockstep.commands.lint.rules.states import restored, stored
from lockstep.commands.lint.tree import walk

_BY_LIBRARY = ("set_optimizer_state_dict", "set_state_dict", "load_state", "load_objects", "setattr", "getattr", "map")


def never_loaded(program: Program) -> Iterator[Hit]:
    """Where a run loads its model from a file: an optimizer's, schedule's or scaler's state is there and never read."""
    if any(program.named.get(name) for name in _BY_LIBRARY):
        return
    kept = dict(_kept(program))
    loads = program.named.get("load_state_dict", [])
    if not kept or any(not _plain(program, call) for call in loads):
        return
    files = restored(program)
    if any(each.state is not None for each in files.values()):
        return  # filled where it stands: what the states hold is the network's and the optimizer's own
    back = [call for call in loads if depends(program, call.args[0], lambda each: each in files)]
    known = {_role(program, call) for call in loads}
    read = _texts_read(program)
    missing = sorted({role for key, role in kept.items() if key not in read and role not in known})
    if back and missing:
        yield Hit(back[0], f"{' and '.join(missing)} saved and never loaded")


def _kept(program: Program) -> Iterator[tuple[str, str]]:
    """The keys under which states other than the network's are written, and whose they are."""
    for each in stored(program):
        for made in origins(program, each.state) if each.state is not None else []:
            for key, value in _pairs(made):
                match value:
                    case ast.Call(func=ast.Attribute(value=owner, attr="state_dict")):
                        found = [roles(program).get(one) for one in origins(program, owner)]
                        yield from ((key, role) for role in found if role is not None and len(found) == 1)


def _pairs(made: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match made:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            yield from ((each.arg, each.value) for each in keywords if each.arg is not None)


def _texts_read(program: Program) -> set[object]:
    """The constants that stand elsewhere than as keys of dictionaries that are written out."""
    keys = {id(key) for one in program.sources for node in one.of(ast.Dict) for key in node.keys}
    return {node.value for one in program.sources for node in one.of(ast.Constant) if id(node) not in keys}


def _plain(program: Program, call: ast.Call) -> bool:
    """Whether a load_state_dict says by itself what it loads into what: no loop's variable, no key of one."""
    if not (isinstance(call.func, ast.Attribute) and call.args) or callee(program, call) is not None:
        return False
    parts = [each for each in walk(call.args[0]) if isinstance(each, ast.Subscript)]
    owners = origins(program, call.func.value)
    told = all(isinstance(each.slice, ast.Constant) for each in parts)
    return told and bool(owners) and all(isinstance(each, ast.Call) for each in owners)


def _role(program: Program, call: ast.Call) -> str | None:
    assert isinstance(call.func, ast.Attribute)
    found = [roles(program).get(each) for each in origins(program, call.func.value)]
    return next((each for each in found if each is not None), None)
