"""The rule about the local rank: who tells it."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.program import Program
from lockstep.commands.lint.rule import Hit, rule


@rule(
    "LS304",
    "local-rank-argument",
    "the local rank is taken from the command line",
    result="under torchrun each process has the default: all ranks use GPU 0 (or fail on an unknown argument)",
    why="torchrun sets LOCAL_RANK in the environment, and passes no --local_rank",
    mend='local_rank = int(os.environ["LOCAL_RANK"])',
)
def local_rank_argument(program: Program) -> Iterator[Hit]:
    """An option --local_rank in a program that never reads LOCAL_RANK."""
    if not program.whole or any(
        re.search(r"LOCAL_RANK|LOCAL_PROCESS|SLURM_LOCALID|get_node_local_rank|deepspeed", source.text)
        for source in program.sources
    ):
        return
    if not any(re.search(r"(?<!def )(\.|\[['\"])local_rank\b", source.text) for source in program.sources):
        return  # nobody reads it
    for call in program.named.get("add_argument", []):
        names = [each.value for each in call.args if isinstance(each, ast.Constant)]
        if {"--local_rank", "--local-rank"} & set(names):
            yield Hit(call)
