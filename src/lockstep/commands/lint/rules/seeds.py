"""Rules about random numbers on the ranks: what has to be equal on them, and what has to differ."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.ranks import on_rank, per_rank
from lockstep.commands.lint.roles import constant, distributed, given, library, lightning, wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import seeded_before_loaders
from lockstep.commands.lint.source import Function, above, function_of

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
    seeds = _seeds(program)
    several = wrapped(program) or library(program, "horovod") or distributed(program)
    if not seeds or not several or not any(_used(program, call) for call in _drops(program)):
        return
    if any(call.args and on_rank(program, call.args[0]) for call in [*seeds, *program.named.get("seed", [])]):
        return
    if any(each.arg == "device_specific" for call in seeds for each in call.keywords):
        return
    if any(re.search(r"torch\.seed\(\)|set_rng_state|fork_rng", source.text) for source in program.sources):
        return
    known = [call for call in seeds if per_rank(program, call) and definition(program, call.func) is None]
    known = [call for call in known if "worker" not in _function_name(program, call)]
    if known:
        yield Hit(known[-1])


_LAYERS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "dropout", "DropPath", "dropout2d", "AlphaDropout")
_INSIDE = ("LSTM", "GRU", "RNN", "MultiheadAttention")
_BY_DEFAULT = ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer")
_DROPPING = re.compile(
    r"^torchvision\.models\.(alexnet|vgg\d|mobilenet|efficientnet|convnext|swin|googlenet|inception|squeezenet|maxvit|mnasnet)"
)


def _used(program: Program, call: ast.Call) -> bool:
    """Whether something in the program reads the name of the function or class that a call stands in."""
    source = program.owner[call]
    outer = [each for each in above(source, call) if isinstance(each, Function | ast.ClassDef)]
    if not outer:
        return True
    return outer[-1].name in _read_names(program)


@remembered
def _read_names(program: Program) -> set[str]:
    nodes = [node for each in program.sources for node in each.nodes]
    return {last_name(node) for node in nodes if isinstance(node, ast.Name | ast.Attribute)}


def _drops(program: Program) -> Iterator[ast.Call]:
    """The calls that make, or run, something that draws masks: layers, torch's recurrent ones, torchvision's models."""
    for name in _LAYERS:
        for call in program.named.get(name, []):
            if not definition(program, call.func) and not _never_drops(program, call):
                yield call
    for name in [*_INSIDE, *_BY_DEFAULT]:
        for call in program.named.get(name, []):
            share = given(program, call, "dropout")
            asked = share is not None if name in _INSIDE else True
            if (
                asked
                and qualified(program, call.func).startswith("torch.")
                and constant(program, share) not in (0, 0.0)
            ):
                yield call
    for call in program.calls:
        off = any(
            constant(program, given(program, call, name)) in (0, 0.0) for name in ("stochastic_depth_prob", "dropout")
        )
        if not off and _DROPPING.search(qualified(program, call.func)):
            yield call


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
    """random_split in each rank of a program whose ranks draw differently; weights without a broadcast."""
    if not program.whole or not distributed(program):
        return
    yield from _own_orders(program)
    yield from seeded_before_loaders(program)
    yield from _weights_apart(program)
    unseeded = not any("seed" in source.text for source in program.sources)
    if not unseeded and not _differ(program):
        return
    cutting = ("DistributedSampler", "Accelerator", "Fabric")
    sharded = lightning(program) or any(program.named.get(name) for name in cutting)
    for call in program.named.get("random_split", []):
        if sharded and per_rank(program, call) and given(program, call, "generator", 2) is None:
            yield Hit(call)
    for call in program.named.get("Subset", []) if sharded else []:
        chosen = given(program, call, "indices", 1)
        if chosen is None or "range(" in ast.unparse(chosen):
            continue  # in order; a permutation may stand in the length alone
        if per_rank(program, call) and depends(program, chosen, _is_permutation):
            yield Hit(call)
    if wrapped(program) or lightning(program) or not unseeded:
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


def _differ(program: Program) -> bool:
    """Whether each seed of the program that is torch's is made of the rank, or there is none but generators'."""
    known = [call for call in _seeds(program) if definition(program, call.func) is None]
    others = [
        name for name in program.named if "seed" in name.lower() and name not in (*_SEEDS, "seed", "initial_seed")
    ]
    return not others and all(call.args and on_rank(program, call.args[0]) for call in known)


_DRAWS = ("randperm", "multinomial", "shuffle", "permutation", "sample", "randint", "choice")
_GENERATORS = ("random", "np.random", "numpy.random", "torch")


def _own_orders(program: Program) -> Iterator[Hit]:
    """A sampler, or iterable set, of the script's that cuts by the rank an order drawn from each rank's generator."""
    if not _differ(program):
        return
    for order in program.methods.get("__iter__", []):
        text = ast.unparse(program.owner[order].parents[order])
        if not re.search(r"\.rank\b|get_rank\(", text):
            continue
        for call in ast.walk(order):
            if isinstance(call, ast.Call) and last_name(call.func) in _DRAWS and isinstance(call.func, ast.Attribute):
                global_one = ast.unparse(call.func.value) in _GENERATORS
                if global_one and not any(each.arg == "generator" for each in call.keywords):
                    yield Hit(call, "an order of each rank's own")


def _weights_apart(program: Program) -> Iterator[Hit]:
    """A model made after a seed of the rank's, and cut by fully_shard, which sends no weights."""
    for call in program.named.get("fully_shard", []):
        for made in origins(program, call.args[0]) if call.args else []:
            if not isinstance(made, ast.Call) or program.owner[made] is not program.owner[call]:
                continue
            nodes = own_nodes(program, made)
            before = [each for each in _seeds(program) if each in nodes and each.lineno < made.lineno and each.args]
            last = max(before, key=lambda each: each.lineno, default=None)
            sent = any(program.named.get(name) for name in ("broadcast", "set_model_state_dict", "load_state_dict"))
            if last is not None and on_rank(program, last.args[0]) and not sent:
                yield Hit(made, "other weights on each rank, and fully_shard sends none")
                return


def _is_permutation(node: ast.AST) -> bool:
    """A permutation that is drawn from a generator of the process."""
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) in ("randperm", "permutation")
        and not any(each.arg == "generator" for each in node.keywords)
    )
