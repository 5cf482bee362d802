"""The calls that write a run's state, and those that read one back: torch's, Fabric's, Accelerate's, in shards."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import given
from lockstep.commands.lint.standins import runs

_SHARDS = ("torch.distributed.checkpoint.", "torch.distributed.checkpoint.state_dict_saver.")


def saves(program: Program) -> list[ast.Call]:
    """The calls that run torch.save, by whatever name; `as_save` has their arguments."""
    return list(runs(program, "torch.save"))


def as_save(program: Program, call: ast.Call) -> ast.Call:
    """A call with the arguments that torch.save gets by it."""
    return runs(program, "torch.save").get(call, call)


def in_memory(program: Program, call: ast.Call) -> bool:
    """Whether a torch.save writes into a buffer, not into a file."""
    path = given(program, as_save(program, call), "f", 1)
    made = origins(program, path) if path is not None else []
    return any(isinstance(each, ast.Call) and last_name(each.func) == "BytesIO" for each in made)


def loads(program: Program) -> list[ast.Call]:
    """The calls that run torch.load, by whatever name; `as_load` has their arguments."""
    return list(runs(program, "torch.load"))


def as_load(program: Program, call: ast.Call) -> ast.Call:
    """A call with the arguments that torch.load gets by it."""
    return runs(program, "torch.load").get(call, call)


@dataclass(frozen=True, eq=False)
class Stored:
    """A call that writes or reads a state: `state` is what is written, or filled where it stands."""

    call: ast.Call
    state: ast.expr | None
    path: ast.expr | None


@remembered
def stored(program: Program) -> list[Stored]:
    """What writes a state to go on from; torch.save into a buffer is none."""
    found = []
    for call in saves(program):
        if not in_memory(program, call):
            seen = as_save(program, call)
            found.append(Stored(call, given(program, seen, "obj", 0), given(program, seen, "f", 1)))
    for call in [*program.named.get("save", []), *program.named.get("async_save", [])]:
        meaning = qualified(program, call.func)
        if meaning.startswith(_SHARDS):
            found.append(Stored(call, given(program, call, "state_dict", 0), given(program, call, "checkpoint_id", 1)))
        elif meaning.startswith("torch_xla.core.xla_model."):
            found.append(Stored(call, given(program, call, "data", 0), given(program, call, "file_or_path", 1)))
        elif _of(program, call, "Fabric"):
            found.append(Stored(call, given(program, call, "state", 1), given(program, call, "path", 0)))
        elif _of(program, call, "Accelerator"):
            found.append(Stored(call, given(program, call, "obj", 0), given(program, call, "f", 1)))
    return found


@remembered
def restored(program: Program) -> dict[ast.AST, Stored]:
    """What holds a state that was read: the calls that return one, and the dictionaries that are filled by one."""
    found: dict[ast.AST, Stored] = {}
    for call in loads(program):
        found[call] = Stored(call, None, given(program, as_load(program, call), "f", 0))
    for each in _filled(program):
        if each.state is None:
            found[each.call] = each
        else:
            filled = [made for made in origins(program, each.state) if isinstance(made, ast.Dict | ast.Call)]
            values = [one for made in filled if isinstance(made, ast.Dict) for one in made.values]
            found |= dict.fromkeys([*filled, *values], each)  # an entry is followed to what was written for it
    return found


def _filled(program: Program) -> Iterator[Stored]:
    for call in program.named.get("load", []):
        if qualified(program, call.func).startswith(_SHARDS):
            yield Stored(call, given(program, call, "state_dict", 0), given(program, call, "checkpoint_id", 1))
        elif _of(program, call, "Fabric"):
            yield Stored(call, given(program, call, "state", 1), given(program, call, "path", 0))


def _of(program: Program, call: ast.Call, kind: str) -> bool:
    """Whether a method is Fabric's or an Accelerator's, by what made the object or by its name."""
    if not program.named.get(kind) or not isinstance(call.func, ast.Attribute) or callee(program, call) is not None:
        return False
    owner = call.func.value
    return kind.lower() in last_name(owner).lower() or bool(made_by(program, owner, kind))


def path_of(program: Program, call: ast.Call) -> ast.expr | None:
    """The path of a call that reads a state."""
    return next((each.path for each in restored(program).values() if each.call is call), None)
