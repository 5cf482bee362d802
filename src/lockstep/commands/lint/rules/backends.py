"""The rule about the backend: NCCL where nothing is on a GPU."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.program import Program
from lockstep.commands.lint.roles import constant, given, library, wrapped
from lockstep.commands.lint.rule import Hit, rule


@rule(
    "LS316",
    "nccl-on-cpu",
    "the backend is NCCL, and everything is on the CPU",
    result="init_process_group or the first collective fails: NCCL reduces tensors of GPUs alone",
    why="nothing in the program asks for a GPU",
    mend='dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")',
)
def nccl_on_cpu(program: Program) -> Iterator[Hit]:
    """backend nccl in a program whose text has no cuda, or that names the CPU as its device alone."""
    if library(program, "accelerate", "lightning", "deepspeed", "apex", "ignite") or len(program.sources) > 20:
        return
    texts = "\n".join(ast.unparse(source.tree) for source in program.sources)
    if re.search(
        r"cuda|accelerator|device_ids=\[|\.gpu\b|npu|xpu|\.to\((rank|local_rank|gpu|args\.\w+)\b|set_device", texts
    ):
        return
    for call in program.named.get("init_process_group", []):
        backend = given(program, call, "backend", 0)
        if backend is not None and constant(program, backend) == "nccl" and _knows_all(program):
            yield Hit(call)


def _knows_all(program: Program) -> bool:
    """Whether the program itself makes a model and its data: nothing that others give could hold a device."""
    return bool(wrapped(program)) or bool(program.named.get("all_reduce"))
