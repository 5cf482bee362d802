"""Rules about evaluation: which samples a printed accuracy is of."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import definition, lineage, method
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import first_read, own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import calls_in, collects, evaluation_loops, inside, loaders_of, step_loops
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.ranks import on_rank
from lockstep.commands.lint.reduced import is_reduced
from lockstep.commands.lint.roles import (
    drops,
    evaluation_loaders,
    of_loader,
    samplers,
    sharding,
)
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_fabric import padded_by_prepare
from lockstep.commands.lint.rules.by_ignite import padded_by_ignite
from lockstep.commands.lint.rules.by_lightning import padded as padded_by_lightning
from lockstep.commands.lint.rules.engine_state import told_from_state
from lockstep.commands.lint.rules.shared import alive, by_passes, every_nth, from_factories, takes_its_share
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.spread import comprehended
from lockstep.commands.lint.tree import text_of
from lockstep.commands.lint.words import PREPARE_LOADERS


@remembered
def prepared(program: Program, loader: ast.Call) -> bool:
    """Whether Accelerate or Fabric cuts a loader in parts for the ranks."""
    for name in PREPARE_LOADERS:
        for call in program.named.get(name, []):
            if isinstance(call.func, ast.Attribute) and any(loader in origins(program, each) for each in call.args):
                return True
    return last_name(loader.func) == "auto_dataloader"


@remembered
def shared_out(program: Program, loader: ast.Call, loop: Loop | ast.comprehension) -> bool:
    """Whether each rank has a part of a loader's set: by a sampler, by a framework, or by its own rank."""
    if prepared(program, loader) or _shards(program, loader, loop):
        return True
    node = of_loader(program, loader, "dataset")
    sets = [each for each in origins(program, node) if isinstance(each, ast.Call)] if node is not None else []
    chosen = alive(program, loop, loader, samplers(program, loader), "sampler", "batch_sampler")
    made = [*chosen, *alive(program, loop, loader, sets, "dataset")]
    known = [each for each in made if last_name(each.func) in ("Subset", "Shares") or each in chosen]
    if any(on_rank(program, argument) for each in known for argument in each.args):
        return True
    if any(takes_its_share(program, each) for each in made):
        return True
    given_to = [argument for each in made for argument in [*each.args, *(key.value for key in each.keywords)]]
    return any(depends(program, argument, every_nth) for argument in given_to)


def _shards(program: Program, loader: ast.Call, loop: Loop | ast.comprehension) -> list[ast.Call]:
    """The samplers that share a set out over the ranks: a library's, or a local class's that changes no order."""
    known = sharding(program, loader)
    for each in samplers(program, loader):
        owner = definition(program, each.func)
        if isinstance(owner, ast.ClassDef) and method(program, owner, "__iter__") is None:
            bases = [last_name(base) for one in lineage(program, owner) for base in one.bases]
            known += [each] if "DistributedSampler" in bases else []
    return alive(program, loop, loader, known, "sampler", "batch_sampler")


@rule(
    "LS104",
    "part-taken-for-whole",
    "a rank's part of the test set is taken for the whole",
    result="the printed accuracy is of 1/N of the set: on 4 processes of 2,500 of 10,000 images",
    why="the loader gives each rank its own part, and nothing adds the ranks' sums",
    mend="sums = torch.tensor([correct, total], device=device)\ndist.all_reduce(sums)\naccuracy = (sums[0] / "
    "sums[1]).item()",
)
def part_taken_for_whole(program: Program) -> Iterator[Hit]:
    """An evaluation loop, or a comprehension, over a shared-out loader whose sums are not reduced."""
    for loop in evaluation_loops(program):
        parts = any(shared_out(program, each, loop) for each in loaders_of(program, loop)) or by_passes(program, loop)
        if parts and not is_reduced(program, loop) and not collects(program, loop):
            yield Hit(first_read(program, loop) or loop)
    for part, statement, _ in comprehended(program, training=False):
        if any(shared_out(program, each, part) for each in loaders_of(program, part)):
            yield Hit(statement)
    yield from (Hit(call) for call in told_from_state(program, training=False))


@rule(
    "LS105",
    "padding-counted",
    "samples that pad the parts are counted twice",
    result="the accuracy depends on N: 10,000 images on 3 processes count as 10,002, the first two of them twice",
    why="DistributedSampler repeats samples until the parts are equal, and Accelerate's gather returns the repeated "
    "ones",
    mend="DataLoader(Subset(test_set, range(rank, len(test_set), world_size)))  # or accelerator.gather_for_metrics",
)
def padding_counted(program: Program) -> Iterator[Hit]:
    """A padded evaluation set whose sums are reduced and never cut to the set's size."""
    yield from padded_by_lightning(program)
    yield from padded_by_ignite(program)
    for call, loop in from_factories(program):
        if is_reduced(program, loop) and not _cut_to_size(program, [loop]):
            yield Hit(call)
    for loader, loops in evaluation_loaders(program).items():
        found = list(dict.fromkeys(each for loop in loops for each in _shards(program, loader, loop)))
        cut = [each for each in found if last_name(each.func) == "DistributedSampler" or definition(program, each.func)]
        padded = [each for each in cut if not drops(program, each)]
        if padded and not _cut_to_size(program, loops):
            if all(is_reduced(program, loop) for loop in loops):
                yield Hit(padded[0])
        elif not cut and prepared(program, loader):
            for loop in loops:
                if not calls_in(program, loop, "gather_for_metrics") and not _cut_to_size(program, [loop]):
                    yield from (Hit(call) for call in calls_in(program, loop, "gather"))
            if not any(_cut_to_size(program, [loop]) for loop in loops):
                yield from padded_by_prepare(program, loader, loops)


def _cut_to_size(program: Program, loops: list[Loop]) -> bool:
    """Whether something around drops what is too much: a slice up to a length, a remainder read by itself."""
    for loop in loops:
        for node in [*inside(program, loop), *_after(program, loop)]:
            if isinstance(node, ast.Slice) and node.upper is not None and not isinstance(node.upper, ast.Constant):
                return True
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _by_number(node.slice):
                return True
            if isinstance(node, ast.Compare) and any(_size(program, each) for each in node.comparators):
                return True  # places beyond the set's size are masked out
    text = "\n".join(source.text for source in program.sources)
    return bool(re.search(r"total_size|aux_val|remainder|gather_for_metrics|unpad|even_batches|drop_dup|dedup", text))


def _size(program: Program, node: ast.expr) -> bool:
    """len(loader.dataset), len(test_set), or a name for it."""
    return any(
        isinstance(each, ast.Call) and last_name(each.func) == "len" and "set" in text_of(each).lower()
        for each in [node, *origins(program, node)]
    )


def _after(program: Program, loop: Loop) -> list[ast.AST]:
    """The nodes around a loop that stand in no other loop over batches: a training loop's slices are its own."""
    source = program.owner[loop]
    others = set(step_loops(program))
    nodes = own_nodes(program, loop)
    if function_of(source, loop) is not None and not any(each in others for each in nodes):
        return nodes
    return [each for each in nodes if not isinstance(each, ast.Slice) or not others & set(above(source, each))]


def _by_number(index: ast.expr) -> bool:
    """out[indices] = values: a sample that comes twice is written over."""
    return "ind" in text_of(index).lower() or "id" in text_of(index).lower().split("_")
