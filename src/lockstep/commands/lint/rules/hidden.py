"""Calls in which all ranks have to take part although no collective is named."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, qualified
from lockstep.commands.lint.roles import constant, given, library, lightning
from lockstep.commands.lint.rules.by_ignite import evaluated


def _of_frameworks(program: Program) -> Iterator[ast.Call]:
    """fabric.save, trainer.save_checkpoint, a synchronised self.log, Ignite's evaluation, Horovod's broadcasts."""
    for name, owner in (("save", "fabric"), ("save_checkpoint", "trainer"), ("all_gather", "self")):
        for call in program.named.get(name, []):
            mine = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value).endswith(owner)
            if mine and (owner != "self" or lightning(program)):
                yield call
    for call in program.named.get("log", []) if lightning(program) else []:
        if constant(program, given(program, call, "sync_dist")) is True:
            yield call
    for name in ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"):
        yield from program.named.get(name, []) if library(program, "horovod") else []
    yield from (call for call, _ in evaluated(program))


def hidden(program: Program) -> list[ast.Call]:
    """The calls that are collectives without the name: sharded states gathered, ZeRO's consolidation, torchmetrics."""
    found = list(program.named.get("consolidate_state_dict", []))
    sharded = any(program.named.get(name) for name in ("fully_shard", "FullyShardedDataParallel", "FSDP"))
    for call in program.calls if sharded else []:
        if re.match(r"torch\.distributed\.checkpoint\.state_dict\.get_\w*state_dict$", qualified(program, call.func)):
            found.append(call)
    found += _of_frameworks(program)
    for call in program.named.get("compute", []) if program.named.get("init_process_group") else []:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        made = [each for each in origins(program, owner) if isinstance(each, ast.Call)] if owner is not None else []
        names = [qualified(program, each.func) for each in made]
        apart = any(each.arg == "sync_on_compute" for one in made for each in one.keywords)
        if names and all(name.startswith("torchmetrics.") for name in names) and not apart:
            found.append(call)
    return found
