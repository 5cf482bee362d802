"""LS3, continued: which GPU a rank uses."""

from __future__ import annotations

import ast

from lockstep_lint.facts.modules import Scope
from lockstep_lint.facts.ranks import alone, environment
from lockstep_lint.facts.training import Facts
from lockstep_lint.facts.tree import keyword, last_name, literal, words
from lockstep_lint.rules import Places, rule

GLOBAL_RANK = frozenset(["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
GET_RANK = frozenset(["torch.distributed.get_rank", "dist.get_rank", "hvd.rank", "horovod.torch.rank"])
OWN_DEVICE = (  # a text that shows that ranks may choose their devices
    r"set_device|CUDA_VISIBLE_DEVICES|cuda:\{|cuda:%|['\"]cuda:?['\"]\s*[,+]|device_ids\s*=\s*\[|cuda\.device\("
    r"|\.(cuda|to)\(\s*(\w+\.)*\w*(rank|gpu|dev_id|device_id|idx)|devices?\[|local_rank\b(?!(\(\))? *==)"
)


@rule("LS303", "rank-as-device")
def rank_as_device(facts: Facts) -> Places:
    """The global rank is used as a device number.

    On the second machine rank 8 asks for GPU 8 of 8: CUDA raises invalid device ordinal. On one machine nothing shows.

    RANK and get_rank() count over all machines, devices are counted on each. A script that does not mention several
    machines is left alone.

    Wrong:
        torch.cuda.set_device(dist.get_rank())
    Right:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    """
    if not facts.kinds & {"torch", "horovod"} or facts.spawns:
        return
    if not facts.says(r"n_?nodes|num_nodes|node_rank|SLURM|nodelist|machines|rank(\(\))? *% *torch"):
        return
    places = [(call, scope, call.args[0]) for call, scope in facts.calls("set_device", "cuda") if call.args]
    places += [(call, scope, call.args[-1]) for call, scope in facts.calls("device") if call.args]
    for call, scope in facts.wraps:
        ids = keyword(call, "device_ids")
        places += [(call, scope, part) for part in (ids.elts if isinstance(ids, ast.List) else [])]
    seen: set[Scope] = set()
    for call, scope, number in places:
        if isinstance(number, ast.JoinedStr):
            number = next((part.value for part in number.values if isinstance(part, ast.FormattedValue)), number)
        if scope not in seen and _global_rank(facts, number, scope):
            seen.add(scope)
            yield call, scope, ""


def _global_rank(facts: Facts, number: ast.expr, scope: Scope) -> bool:
    """Whether a number is the rank over all machines, and nothing else."""
    found = False
    for value in facts.sources(number, scope):
        expr = value.expr
        if isinstance(expr, ast.Call) and last_name(expr) == "int" and expr.args:
            expr = expr.args[0]
        if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add) and "node" in " ".join(words(expr)).lower():
            found = True  # node_rank * gpus + local_rank
            continue
        if isinstance(expr, (ast.BinOp, ast.Constant)) or "local" in " ".join(words(expr)).lower():
            return False
        if variable := environment(expr):
            if variable not in GLOBAL_RANK:
                return False
            found = True
        elif isinstance(expr, ast.Call):
            if facts.qualified(expr, value.scope) in GET_RANK:
                found = True
            elif facts.resolve(expr.func, value.scope) is None:
                return False
    return found


@rule("LS304", "local-rank-argument")
def local_rank_argument(facts: Facts) -> Places:
    """The local rank is read from the command line only.

    Under torchrun each process has the default, so all of them use GPU 0 or train alone; torch.distributed.launch of
    torch 2 passes --local-rank, which the script rejects.

    Wrong:
        parser.add_argument("--local_rank", type=int, default=0)
    Right:
        local_rank = int(os.environ["LOCAL_RANK"])
    """
    option = facts.options.get("local_rank")
    if option is None or "torch" not in facts.kinds or len(option.args) > 1 or facts.spawns:
        return
    if facts.says("LOCAL_RANK|deepspeed") or not facts.says(r"\.local_rank\b"):
        return
    if not any(module.stores.get("local_rank") for module in facts.modules):
        module = next(each for each in facts.modules if option in each.parents)
        yield option, module.scope_of(option), ""


@rule("LS318", "one-device")
def one_device(facts: Facts) -> Places:
    """All ranks use the same GPU.

    NCCL refuses two ranks on one GPU; with gloo N processes share one GPU, which needs N times the memory and is no
    faster.

    "cuda" is GPU 0 in each process until torch.cuda.set_device is called; "cuda:0" always is. Where
    CUDA_VISIBLE_DEVICES names one GPU for all ranks, those above 0 find no GPU of their number.

    Wrong:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(model.to("cuda"))
    Right:
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = DistributedDataParallel(model.to("cuda"))
    """
    if not facts.by_hand:
        return
    yield from _one_visible(facts)
    chosen = {"cuda:0"} if facts.says(OWN_DEVICE) else {"cuda:0", "cuda"}
    averaged = [*facts.wraps, *(c for c in facts.calls("DistributedOptimizer") if "horovod" in facts.kinds)]
    if averaged and "horovod" in facts.kinds and "cuda" in chosen and any(facts.calls("cuda")):
        yield *averaged[0], "nothing chooses a GPU by the local rank"
        return
    for call, scope in facts.wraps:
        if alone(facts, call, scope) or not call.args or not facts.per_rank(scope):
            continue
        devices = _devices(facts, call.args[0], scope)
        if devices and devices <= chosen:
            yield call, scope, f"the model is on {min(devices)}"


def _one_visible(facts: Facts) -> Places:
    """Assignments that let each process see one GPU, the same one."""
    for module in facts.modules if facts.wraps or "horovod" in facts.kinds else ():
        for node in module.tree.body if module.says("CUDA_VISIBLE_DEVICES") else ():
            match node:
                case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="CUDA_VISIBLE_DEVICES"))], value=value):
                    number = str(literal(value))
                    if number.isdigit() and facts.per_rank(module.scope):
                        yield node, module.scope, f"each process sees GPU {number} alone"


def _devices(facts: Facts, model: ast.expr, scope: Scope) -> set[str]:
    """The GPUs that a model is moved to, as texts; with an unknown one among them the answer is empty."""
    found: set[str] = set()
    moves = [
        v for v in facts.sources(model, scope) if isinstance(v.expr, ast.Call) and last_name(v.expr) in ("to", "cuda")
    ]
    for move in moves:
        arguments = move.expr.args if isinstance(move.expr, ast.Call) else []
        if not arguments:
            found.add(last_name(move.expr))
        for source in facts.sources(arguments[0], move.scope) if arguments else ():
            match source.expr:
                case ast.Constant(value=str() as text):
                    found.add(text)
                case ast.Constant(value=int() as number) if source.expr is arguments[0]:
                    found.add(f"cuda:{number}")
                case ast.Constant() | ast.JoinedStr() | ast.BinOp() | ast.Subscript():
                    return set()
                case ast.Call() if last_name(source.expr) != "device":
                    return set()
    return found - {"cpu"}
