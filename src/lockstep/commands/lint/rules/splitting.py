"""The rule about what has to be equal on all ranks and is drawn by each: splits, orders, first weights."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.drawn import differs, draws_in
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.guards import guarded, per_rank
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.roles import given, loaders, of_loader, sharding
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import managed, seeded_before_loaders
from lockstep.commands.lint.rules.weights import weights_apart
from lockstep.commands.lint.seeding import SEEDS, by_rank, torch_seeds, unequal, used
from lockstep.commands.lint.several import distributed, library, lightning, wrapped
from lockstep.commands.lint.tree import text_of, walk


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
    """A split or an order that each rank draws otherwise; weights without a broadcast."""
    if not program.whole or not distributed(program):
        return
    yield from _own_orders(program)
    yield from seeded_before_loaders(program)
    yield from weights_apart(program)
    yield from _sampler_seeds(program)
    for draw in _splits(program):
        if differs(program, draw) and per_rank(program, draw) and not _told(program, draw):
            yield Hit(draw)
    yield from _never_equal(program)


def _splits(program: Program) -> list[ast.Call]:
    """The draws that decide what the ranks' loaders read, where each is to have a part of one set."""
    cut = ("DistributedSampler", "Accelerator", "Fabric")
    if not lightning(program) and not any(program.named.get(name) for name in cut):
        return []
    found = [call for call in program.named.get("random_split", []) if definition(program, call.func) is None]
    roots = [of_loader(program, loader, "dataset") for loader in loaders(program)]
    roots += [given(program, call, "indices", 1) for call in program.named.get("Subset", [])]
    for root in roots:
        found += draws_in(program, root) if root is not None else []
    return [each for each in dict.fromkeys(found) if used(program, each)]


def _told(program: Program, draw: ast.Call) -> bool:
    """Whether one rank draws and the others are told, or the result was kept in a file."""
    if guarded(program, draw):
        return True
    source = program.owner[draw]
    function = function_of(source, draw)
    if function is not None and function.name == "prepare_data":
        return True
    if any(isinstance(each, ast.Call) and "broadcast" in last_name(each.func) for each in own_nodes(program, draw)):
        return True
    tests = [text_of(each.test) for each in above(source, draw) if isinstance(each, ast.If)]
    return any(re.search(r"exists|is_file|isfile", each) for each in tests)


def _sampler_seeds(program: Program) -> Iterator[Hit]:
    """DistributedSampler(seed=...) of the rank, or of the clock: each rank then cuts an order of its own."""
    for loader in loaders(program):
        for sampler in sharding(program, loader):
            seed = given(program, sampler, "seed", 4)
            if seed is not None and unequal(program, seed):
                yield Hit(seed, "the sampler's order is another on each rank")
                return


def _never_equal(program: Program) -> Iterator[Hit]:
    """Weights that no broadcast makes equal: Horovod without one, gradients averaged by hand."""
    seeded = any("seed" in source.text for source in program.sources)
    if wrapped(program) or lightning(program) or managed(program) or (seeded and not _differ(program)):
        return
    text = "\n".join(source.text for source in program.sources)
    if library(program, "horovod.torch") and not re.search(r"broadcast_parameters|load_state_dict|elastic", text):
        yield from (
            Hit(call, "no broadcast of the parameters") for call in program.named.get("DistributedOptimizer", [])
        )
    by_hand = [call for call in program.named.get("all_reduce", []) if _of_gradients(program, call)]
    if (
        by_hand
        and program.named.get("init_process_group")
        and not re.search(r"broadcast|load_state_dict|fully_shard|FSDP", text)
    ):
        yield Hit(by_hand[0], "gradients averaged by hand, weights never made equal")


def _of_gradients(program: Program, call: ast.Call) -> bool:
    """all_reduce of p.grad, or of a tensor that gradients were put together into."""
    return ".grad" in text_of(call) or any(
        isinstance(made, ast.Call)
        and ".grad" in text_of(made)
        and last_name(made.func) in ("cat", "_flatten_dense_tensors")
        for part in call.args[:1]
        for made in origins(program, part)
    )


def _differ(program: Program) -> bool:
    """Whether each seed of the program that is torch's is made of the rank, or there is none but generators'."""
    known = [call for call in torch_seeds(program) if definition(program, call.func) is None]
    others = [name for name in program.named if "seed" in name.lower() and name not in (*SEEDS, "seed", "initial_seed")]
    return not others and all(by_rank(program, call) for call in known)


_DRAWS = ("randperm", "multinomial", "shuffle", "permutation", "sample", "randint", "choice")
_GENERATORS = ("random", "np.random", "numpy.random", "torch")


def _own_orders(program: Program) -> Iterator[Hit]:
    """A sampler, or iterable set, of the script's that cuts by the rank an order drawn from each rank's generator."""
    if not _differ(program):
        return
    for order in program.methods.get("__iter__", []):
        text = text_of(program.owner[order].parents[order])
        if not re.search(r"\.rank\b|get_rank\(", text):
            continue
        for call in walk(order):
            if isinstance(call, ast.Call) and last_name(call.func) in _DRAWS and isinstance(call.func, ast.Attribute):
                global_one = text_of(call.func.value) in _GENERATORS
                if global_one and not any(each.arg == "generator" for each in call.keywords):
                    yield Hit(call, "an order of each rank's own")
