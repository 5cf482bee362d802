"""The calls in which all ranks of a group have to take part."""

import ast
import re

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.program import Program, qualified, remembered
from lockstep.commands.lint.tree import text_of

_COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "reduce",
    "broadcast",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "reduce_scatter",
    "all_to_all",
    "scatter",
    "gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "gather_into_tensor",
    "gather_single",
    "allreduce",
    "wait_for_everyone",
    "gather_for_metrics",
    "monitored_barrier",
    "allgather",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "pad_across_processes",
    "allgather_object",
    "grouped_allreduce",
}


@remembered
def collectives(program: Program) -> list[ast.Call]:
    """The calls in which all ranks of a group have to take part."""
    found = []
    for name in _COLLECTIVES:
        for call in program.named.get(name, []):
            text = qualified(program, call.func)
            owner = text_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            managed = definition(program, call.func) is None and (
                re.search(r"accelerator|fabric|(^|\.)hvd$|idist|strategy", owner) or _of_manager(program, call)
            )
            if (text.startswith(("torch.distributed.", "horovod.", "ignite.distributed.")) or managed) and not (
                owner.endswith("Function") or text.startswith(("torch.distributed.nn.",))
            ):
                found.append(call)
    return found


def _of_manager(program: Program, call: ast.Call) -> bool:
    """Whether a call is a method's of an Accelerator or a Fabric, by whatever name."""
    known = program.named.get("Accelerator") or program.named.get("Fabric")
    owner = call.func.value if isinstance(call.func, ast.Attribute) and known else None
    return owner is not None and bool(made_by(program, owner, "Accelerator", "Fabric"))
