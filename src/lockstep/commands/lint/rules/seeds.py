"""Rules about random numbers on the ranks: what has to be equal on them, and what has to differ."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import on_rank, per_rank
from lockstep.commands.lint.roles import constant, distributed, given, library, lightning, wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.source import function_of

_SEEDS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed", "seed_all", "set_random_seed")


def _seeds(program: Program) -> list[ast.Call]:
    """The calls that seed torch's generator of this process."""
    found = []
    for name in _SEEDS:
        for call in program.named.get(name, []):
            text = qualified(program, call.func)
            if name != "manual_seed" or text in (
                "torch.manual_seed",
                "torch.random.manual_seed",
                "torch.cuda.manual_seed",
            ):
                found.append(call)
    return found


@rule(
    "LS211",
    "equal-dropout",
    "all ranks draw the same dropout masks",
    result="the k-th samples of all ranks lose the same units: a step sees N times fewer different masks",
    why="the seed is the same on all ranks, and stays so after the weights are drawn",
    mend="torch.manual_seed(seed)         # the same initial weights\nmodel = Net()\ntorch.manual_seed(seed + rank)  # "
    "other masks",
)
def equal_dropout(program: Program) -> Iterator[Hit]:
    """Dropout in a distributed program that seeds, and never by the rank."""
    drops = [
        call
        for name in ("Dropout", "Dropout2d", "dropout", "DropPath", "dropout2d", "AlphaDropout")
        for call in program.named.get(name, [])
    ]
    drops = [each for each in drops if not definition(program, each.func) and not _never_drops(program, each)]
    seeds = _seeds(program)
    if not drops or not seeds or not wrapped(program) or library(program, "accelerate", "lightning"):
        return
    if any(call.args and on_rank(program, call.args[0]) for call in [*seeds, *program.named.get("seed", [])]):
        return
    if any(each.arg in ("device_specific", "workers") for call in seeds for each in call.keywords):
        return
    if any(re.search(r"torch\.seed\(\)|set_rng_state|fork_rng", source.text) for source in program.sources):
        return
    known = [call for call in seeds if per_rank(program, call) and definition(program, call.func) is None]
    known = [call for call in known if "worker" not in _function_name(program, call)]
    if known:
        yield Hit(known[-1])


def _function_name(program: Program, call: ast.Call) -> str:
    function = function_of(program.owner[call], call)
    return function.name if function is not None else ""


def _never_drops(program: Program, call: ast.Call) -> bool:
    share = given(
        program, call, "p", 1 if qualified(program, call.func).endswith(("functional.dropout", "F.dropout")) else 0
    )
    factors = [share.left, share.right] if isinstance(share, ast.BinOp) and isinstance(share.op, ast.Mult) else [share]
    return any(constant(program, each) in (0, 0.0) for each in factors)


@rule(
    "LS212",
    "seeds-unset",
    "ranks draw different splits or weights",
    result="each rank cuts the set elsewhere: samples of one rank's test part are trained on by another; weights "
    "differ without DDP",
    why="no seed is set, so each process's generator starts anywhere",
    mend="random_split(dataset, sizes, generator=torch.Generator().manual_seed(0))",
)
def seeds_unset(program: Program) -> Iterator[Hit]:
    """random_split in each rank of a program that never seeds; weights without a broadcast."""
    if (
        not program.whole
        or not distributed(program)
        or lightning(program)
        or any("seed" in source.text for source in program.sources)
    ):
        return
    sharded = {name for name in ("DistributedSampler", "Accelerator") if program.named.get(name)}
    for call in program.named.get("random_split", []):
        if sharded and per_rank(program, call) and given(program, call, "generator", 2) is None:
            yield Hit(call)
    for call in program.named.get("Subset", []) if sharded else []:
        chosen = given(program, call, "indices", 1)
        if chosen is not None and per_rank(program, call) and depends(program, chosen, _is_permutation):
            yield Hit(call)
    if wrapped(program):
        return
    text = "\n".join(source.text for source in program.sources)
    if library(program, "horovod.torch") and not re.search(r"broadcast_parameters|load_state_dict|elastic", text):
        yield from (
            Hit(call, "no broadcast of the parameters") for call in program.named.get("DistributedOptimizer", [])
        )
    by_hand = [call for call in program.named.get("all_reduce", []) if ".grad" in ast.unparse(call)]
    if (
        by_hand
        and program.named.get("init_process_group")
        and not re.search(r"broadcast|load_state_dict|fully_shard|FSDP", text)
    ):
        yield Hit(by_hand[0], "gradients averaged by hand, weights never made equal")


def _is_permutation(node: ast.AST) -> bool:
    """A permutation that is drawn from a generator of the process."""
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) in ("randperm", "permutation")
        and not any(each.arg == "generator" for each in node.keywords)
    )
