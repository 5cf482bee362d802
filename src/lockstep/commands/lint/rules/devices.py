"""The rule about a device's number: which rank it comes from."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of

_GLOBAL = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
_HERE = re.compile(r"^tcp://(localhost|127\.0\.0\.1)\b|^(localhost|127\.0\.0\.1)$")


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
    """set_device, device(), device_ids, "cuda:..." of get_rank() or RANK, with no count of devices in it."""
    for node in _device_numbers(program):
        kinds = _kinds(program, node)
        if "global" in kinds and kinds <= {"global", "constant"}:
            yield Hit(_place(program, node))
            return


def _place(program: Program, node: ast.expr) -> ast.AST:
    """Where a device was made of the number, if that is elsewhere."""
    for made in origins(program, node):
        named = isinstance(made, ast.Call) and last_name(made.func) in ("device", "format")
        if named or isinstance(made, ast.JoinedStr) or (isinstance(made, ast.BinOp) and "cuda" in text_of(made)):
            return made
    return node


def _kinds(program: Program, node: ast.AST, depth: int = 0) -> set[str]:
    """What a number or a device's name is made of: a global or a local rank, a constant, or what can't be told."""
    found = set[str]()
    for made in origins(program, node) if depth < 8 else [node]:
        found |= _kind(program, made, depth + 1)
    return found


def _kind(program: Program, made: ast.AST, depth: int) -> set[str]:
    match made:
        case ast.Constant():
            return {"constant"}
        case ast.JoinedStr(values=parts):
            inner = [each.value for each in parts if isinstance(each, ast.FormattedValue)]
            return _all(program, inner, depth)
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
            return _all(program, right.elts if isinstance(right, ast.Tuple) else [right], depth)
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Add(), right=right):
            return _kinds(program, right, depth)
        case ast.BinOp(op=ast.Mod()):
            return {"local"}
        case ast.BinOp():
            return {"global"} if _given_as_rank(program, made) else {"unknown"}
        case ast.Subscript(slice=ast.Constant(value=name)):
            return {"global"} if name in _GLOBAL and not _one_machine(program) else {"unknown"}
        case ast.Attribute(attr="process_index" | "global_rank" | "node_rank"):
            return {"global"}
        case ast.Call():
            return _of_call(program, made, depth)
    return {"unknown"}


def _all(program: Program, nodes: list[ast.expr], depth: int) -> set[str]:
    return {kind for each in nodes for kind in _kinds(program, each, depth)}


def _of_call(program: Program, call: ast.Call, depth: int) -> set[str]:
    name, first = last_name(call.func), next(iter(call.args), None)
    if name in ("int", "str", "abs", "min") and first is not None:
        return _kinds(program, first, depth)
    if name == "device" and call.args:
        return _kinds(program, call.args[-1], depth)
    if name == "format" and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant):
        return _all(program, call.args, depth)
    if name in ("get", "getenv") and isinstance(first, ast.Constant):
        known = first.value in _GLOBAL and not _one_machine(program)
        return {"global", *_all(program, call.args[1:], depth)} if known else {"unknown"}
    whole = name == "get_rank" and not call.keywords and not call.args
    if whole or (name == "rank" and re.match(r"horovod\.|hvd\.", qualified(program, call.func))):
        return {"unknown"} if _one_machine(program) else {"global"}
    return {"unknown"}


@remembered
def _given_as_rank(program: Program, node: ast.AST) -> bool:
    """Whether a computed number is what the group takes for the rank: node * gpus + gpu."""
    ranks = [given(program, call, "rank") for call in program.named.get("init_process_group", [])]
    return any(node in origins(program, each) for each in ranks if each is not None)


@remembered
def _one_machine(program: Program) -> bool:
    """Whether the program's processes can only meet on one machine, where ranks and devices are counted alike."""
    for call in program.named.get("init_process_group", []):
        rank = given(program, call, "rank")
        for made in origins(program, rank) if rank is not None else []:
            owner = program.owner[made].scopes[made] if isinstance(made, ast.arg) else None
            if isinstance(owner, Function) and any(site.spawned for site in sites(program, owner)):
                return True  # the number that spawn gives
        method = given(program, call, "init_method", 1)
        if _HERE.match(str(constant(program, method))):
            return True
    return any(
        each.value is not None and isinstance(each.value, ast.expr) and _HERE.match(str(constant(program, each.value)))
        for source in program.sources
        for text in ("os.environ['MASTER_ADDR']", "environ['MASTER_ADDR']")
        for each in source.attributes.get(text, [])
    )


_TAKES = ("torch.device", "torch.cuda.device", "torch.set_default_device")
_NAMED = ("device", "device_id", "output_device", "map_location")


def _device_numbers(program: Program) -> Iterator[ast.expr]:
    """What is said to be a device, or its number."""
    for call in program.calls:
        name, meant = last_name(call.func), qualified(program, call.func)
        if (name == "set_device" or meant in _TAKES) and call.args:
            yield call.args[-1]
        elif name in ("cuda", "to") and call.args and isinstance(call.func, ast.Attribute) and not meant:
            yield call.args[0]
        for keyword in call.keywords:
            if keyword.arg == "device_ids" and isinstance(keyword.value, ast.List) and len(keyword.value.elts) == 1:
                yield keyword.value.elts[0]
            elif keyword.arg in _NAMED or (keyword.arg == "index" and meant == "torch.device"):
                yield keyword.value
    for source in program.sources:
        for text in ("os.environ['CUDA_VISIBLE_DEVICES']", "environ['CUDA_VISIBLE_DEVICES']"):
            for binding in source.attributes.get(text, []):
                if isinstance(binding.value, ast.expr):
                    yield binding.value
