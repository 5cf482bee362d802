"""Rules about which device a process takes: by which number, and who tells it."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.rule import Hit, rule


def _global_rank(node: ast.AST) -> bool:
    """dist.get_rank(), RANK, hvd.rank(), or a process's index over all machines."""
    match node:
        case ast.Call(func=function):
            return last_name(function) in ("get_rank",) or ast.unparse(function) == "hvd.rank"
        case ast.Constant(value="RANK" | "SLURM_PROCID" | "OMPI_COMM_WORLD_RANK"):
            return True
        case ast.Attribute(attr="process_index" | "global_rank" | "node_rank") | ast.Name(id="node_rank"):
            return True
    return False


@rule(
    "LS303",
    "rank-as-device",
    "the rank over all machines is taken for a device's number",
    result="on the second machine rank 8 asks for GPU 8 of 8: CUDA raises invalid device ordinal; on one machine "
    "nothing shows",
    why="RANK and get_rank() count over all machines, devices count on each",
    mend='local_rank = int(os.environ["LOCAL_RANK"])\ntorch.cuda.set_device(local_rank)',
)
def rank_as_device(program: Program) -> Iterator[Hit]:
    """set_device, device() or device_ids of get_rank() or RANK, with no count of devices in it."""
    for node in _device_numbers(program):
        if not depends(program, node, _global_rank) or _is_local(program, node):
            continue
        yield Hit(node)
        return


def _is_local(program: Program, node: ast.AST) -> bool:
    """Whether a number is cut to a machine's devices, or a local rank enters it, as a fallback does."""

    def wanted(each: ast.AST) -> bool:
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mod):
            return True
        text = each.value if isinstance(each, ast.Constant) else last_name(each)
        return isinstance(text, str) and bool(re.search("local|LOCAL", text))

    return depends(program, node, wanted)


def _device_numbers(program: Program) -> Iterator[ast.expr]:
    for call in program.calls:
        name = last_name(call.func)
        if name == "set_device" and call.args:
            yield call.args[0]
        elif name == "device" and len(call.args) == 2 and qualified(program, call.func) == "torch.device":
            yield call.args[1]
        elif (
            name == "device"
            and call.args
            and isinstance(call.args[0], ast.JoinedStr)
            and "cuda" in ast.unparse(call.args[0])
        ) or (
            name == "cuda" and call.args and isinstance(call.func, ast.Attribute) and not qualified(program, call.func)
        ):
            yield call.args[0]
        for keyword in call.keywords:
            if keyword.arg == "device_ids" and isinstance(keyword.value, ast.List) and len(keyword.value.elts) == 1:
                yield keyword.value.elts[0]


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
