"""Rules about devices and the wrapped model: what DDP was given, and what is called."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import inside, step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import guarded
from lockstep.commands.lint.roles import constant, given, library, wrapped, wraps
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import unwrapped_calls
from lockstep.commands.lint.source import above


@rule(
    "LS301",
    "wrapped-before-moved",
    "the model is moved after it was wrapped",
    result="DDP has made its buckets for the CPU's parameters: it raises, or reduces over the CPU, many times slower",
    why=".to(device) gives parameters another place after DDP has taken note of them",
    mend="model = Net().to(device)\nmodel = DistributedDataParallel(model, device_ids=[local_rank])",
)
def wrapped_before_moved(program: Program) -> Iterator[Hit]:
    """.cuda() or .to(device) of what DistributedDataParallel returned."""
    for name in ("cuda", "to"):
        for call in program.named.get(name, []):
            if (
                isinstance(call.func, ast.Attribute)
                and wraps(program, call.func.value)
                and _is_move(call)
                and not _moved_before(program, call)
            ):
                yield Hit(call)


def _is_move(call: ast.Call) -> bool:
    return last_name(call.func) == "cuda" or (
        bool(call.args) and "dtype" not in ast.unparse(call) and "float" not in ast.unparse(call)
    )


def _moved_before(program: Program, call: ast.Call) -> bool:
    """Whether the model was on its device when it was wrapped: then the second move does nothing."""
    assert isinstance(call.func, ast.Attribute)
    for made in wraps(program, call.func.value):
        inner = made.args[0] if made.args else None
        while (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and last_name(inner.func) not in ("to", "cuda")
        ):
            inner = inner.func.value
        if isinstance(inner, ast.Call) and last_name(inner.func) in ("to", "cuda"):
            return True
        source = program.owner[made]
        for other in [*program.named.get("to", []), *program.named.get("cuda", [])]:
            same = (
                isinstance(other.func, ast.Attribute)
                and inner is not None
                and ast.dump(other.func.value) == ast.dump(inner)
            )
            if same and program.owner[other] is source and other.lineno < made.lineno:
                return True
    return False


@rule(
    "LS302",
    "unwrapped-in-training",
    "the training step calls the model without its wrapper",
    result="gradients are never averaged: each rank trains a model of its own on 1/N of the data, and one of them is "
    "saved",
    why="DDP's hooks are set up in the wrapper's forward",
    mend="outputs = ddp_model(images)",
)
def unwrapped_in_training(program: Program) -> Iterator[Hit]:
    """In a step loop, a call of the model that DDP was given, or of .module, whose loss runs backward."""
    yield from unwrapped_calls(program)
    kept = {each for call in wrapped(program) if call.args for each in origins(program, call.args[0])}
    if not kept:
        return
    for call in program.named.get("create_supervised_trainer", []):
        model = call.args[0] if call.args else None
        if model is not None and not wraps(program, model) and set(origins(program, model)) & kept:
            yield Hit(call)
    for loop in step_loops(program):
        for node in inside(program, loop):
            if not (isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name | ast.Attribute)):
                continue
            direct = (
                isinstance(node.func, ast.Attribute) and node.func.attr == "module" and wraps(program, node.func.value)
            )
            made = (
                []
                if direct or qualified(program, node.func) or definition(program, node.func)
                else origins(program, node.func)
            )
            bare = (
                bool(made)
                and not wraps(program, node.func)
                and bool(set(made) & kept)
                and all(isinstance(each, ast.Call) for each in made)
                and isinstance(node.func, ast.Name)
            )
            if (
                (direct or bare)
                and not guarded(program, node)
                and _trains(program, node, loop)
                and not _reduced_by_hand(program)
            ):
                yield Hit(node)


def _trains(program: Program, node: ast.Call, loop: ast.AST) -> bool:
    """Whether a call's result enters a backward pass: no no_grad around, and the loop has no call of the wrapper."""
    for outer in above(program.owner[node], node):
        if isinstance(outer, ast.With) and any(
            re.search("no_grad|inference|eval", ast.unparse(item)) for item in outer.items
        ):
            return False
    return not any(
        isinstance(each, ast.Call) and each.args and wraps(program, each.func)
        for each in inside(program, loop)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name | ast.Attribute)
    )


def _reduced_by_hand(program: Program) -> bool:
    return any(".grad" in ast.unparse(call) for call in program.named.get("all_reduce", []))


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
