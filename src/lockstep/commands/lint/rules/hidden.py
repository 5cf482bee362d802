"""Calls in which all ranks have to take part although no collective is named."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rules.by_ignite import evaluated
from lockstep.commands.lint.several import library, lightning
from lockstep.commands.lint.tree import text_of

_LIGHTNING = ("lightning", "pytorch_lightning")
_FSDP = ("FullyShardedDataParallel", "FSDP")


def _of_frameworks(program: Program) -> Iterator[ast.Call]:
    """fabric.save, trainer.save_checkpoint, a synchronised self.log, Ignite's evaluation, Horovod's broadcasts."""
    names = (("save", "fabric", "Fabric"), ("save_checkpoint", "trainer", "Trainer"), ("all_gather", "self", ""))
    for name, owner, kind in names:
        for call in program.named.get(name, []):
            value = call.func.value if isinstance(call.func, ast.Attribute) else None
            known = bool(kind) and library(program, *_LIGHTNING)
            made = value is not None and known and bool(made_by(program, value, kind))
            mine = value is not None and (text_of(value).endswith(owner) or made)
            if mine and (owner != "self" or lightning(program)):
                yield call
    for call in program.named.get("log", []) if lightning(program) else []:
        if constant(program, given(program, call, "sync_dist")) is True:
            yield call
    for name in ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"):
        yield from program.named.get(name, []) if library(program, "horovod") else []
    yield from (call for call, _ in evaluated(program))


_SHARED_OUT = re.compile(r"torch\.distributed\.checkpoint(\.state_dict_\w+)?\.(async_)?(save|load)(_state_dict)?$")


def _of_shards(program: Program) -> Iterator[ast.Call]:
    """What every rank writes or gathers its shards by: a distributed checkpoint, FSDP's states and its forward."""
    for name in ("save", "load", "async_save", "save_state_dict", "load_state_dict"):
        for call in program.named.get(name, []):
            alone = any(each.arg in ("no_dist", "process_group") for each in call.keywords)
            if _SHARED_OUT.search(qualified(program, call.func)) and not alone:
                yield call
    if not any(program.named.get(name) for name in _FSDP):
        return
    for name in ("optim_state_dict", "full_optim_state_dict", "summon_full_params"):
        for call in program.named.get(name, []):
            if isinstance(call.func, ast.Attribute) and last_name(call.func.value) in _FSDP:
                yield call
    for call in program.calls:
        if isinstance(call.func, ast.Name) and call.args and made_by(program, call.func, *_FSDP):
            yield call


def hidden(program: Program) -> list[ast.Call]:
    """The calls that are collectives without the name: sharded states gathered, ZeRO's consolidation, torchmetrics."""
    found = list(program.named.get("consolidate_state_dict", []))
    sharded = any(program.named.get(name) for name in ("fully_shard", "FullyShardedDataParallel", "FSDP"))
    for call in program.calls if sharded else []:
        if re.match(r"torch\.distributed\.checkpoint\.state_dict\.get_\w*state_dict$", qualified(program, call.func)):
            found.append(call)
    found += _of_frameworks(program)
    found += _of_shards(program)
    for call in program.named.get("compute", []) if program.named.get("init_process_group") else []:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        made = [each for each in origins(program, owner) if isinstance(each, ast.Call)] if owner is not None else []
        names = [qualified(program, each.func) for each in made]
        apart = any(each.arg == "sync_on_compute" for one in made for each in one.keywords)
        if names and all(name.startswith("torchmetrics.") for name in names) and not apart:
            found.append(call)
    return found
