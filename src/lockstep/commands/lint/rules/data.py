"""Rules about samplers and loaders: who reads which samples."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.origins import made_by, origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.roles import (
    SHARDING,
    constant,
    given,
    lightning,
    loaders,
    of_loader,
    samplers,
    sharding,
    training_loaders,
)
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.source import Source, above, function_of


@rule(
    "LS101",
    "no-set-epoch",
    "set_epoch is never called",
    result="every epoch has the order of the first one, on 2 processes and more; each rank sees the same part in all "
    "of them",
    why="DistributedSampler shuffles by seed + epoch, and its epoch stays 0 until set_epoch says otherwise",
    mend="for epoch in range(epochs):\n    sampler.set_epoch(epoch)",
)
def no_set_epoch(program: Program) -> Iterator[Hit]:
    """A sharding sampler that shuffles, whose loader is run over in each epoch, in a program without set_epoch."""
    if any(_reaches(program, call) for call in program.named.get("set_epoch", [])):
        return
    if lightning(program) or not program.whole:
        return
    around = step_loops(program)
    for loader, loops in training_loaders(program).items():
        if any(around[loop] for loop in loops) and not _told_by_fabric(program, loader):
            for sampler in sharding(program, loader):
                if constant(program, given(program, sampler, "shuffle", 3)) is not False:
                    yield Hit(sampler)
            yield from (Hit(call) for call in _own_epochs(program, loader))
    handled = any(each.arg == "train_sampler" for call in program.calls for each in call.keywords)
    for call in program.named.get("run", []) if not handled else []:  # Ignite's engine
        if call.args and given(program, call, "max_epochs") is not None:
            for made in origins(program, call.args[0]):
                if isinstance(made, ast.Call) and last_name(made.func) == "DataLoader":
                    yield from (Hit(each) for each in sharding(program, made))
                auto = isinstance(made, ast.Call) and last_name(made.func) == "auto_dataloader"
                if auto and isinstance(made, ast.Call) and constant(program, given(program, made, "shuffle")) is True:
                    yield Hit(made)


def _told_by_fabric(program: Program, loader: ast.Call) -> bool:
    """Fabric sets the epoch of any sampler that has one."""
    return any(
        loader in origins(program, each) for call in program.named.get("setup_dataloaders", []) for each in call.args
    )


def _reaches(program: Program, call: ast.Call) -> bool:
    """Whether a set_epoch may reach a sampler: torch's own DataLoader has none."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    made = origins(program, owner) if owner is not None else []
    plain = [each for each in made if isinstance(each, ast.Call) and last_name(each.func) == "DataLoader"]
    asks = any(
        isinstance(each, ast.If) and "hasattr" in ast.unparse(each.test) for each in above(program.owner[call], call)
    )
    prepared = any(program.named.get(name) for name in ("prepare", "setup_dataloaders"))
    return not (plain and len(plain) == len(made) and asks and not prepared)


def _own_epochs(program: Program, loader: ast.Call) -> Iterator[ast.Call]:
    """A local sampler, or iterable set, whose order goes by self.epoch, which nothing sets but its own __init__."""
    node = of_loader(program, loader, "dataset")
    made = [*samplers(program, loader), *(origins(program, node) if node is not None else [])]
    for call in made:
        owner = definition(program, call.func) if isinstance(call, ast.Call) else None
        order = method(program, owner, "__iter__") if isinstance(owner, ast.ClassDef) else None
        sharded = isinstance(owner, ast.ClassDef) and any(last_name(base) in SHARDING for base in owner.bases)
        if sharded and isinstance(call, ast.Call):
            yield call
            continue
        reads = order is not None and any(isinstance(e, ast.Attribute) and e.attr == "epoch" for e in ast.walk(order))
        if not (reads and isinstance(call, ast.Call) and isinstance(owner, ast.ClassDef)):
            continue
        home = program.owner[owner]
        told = [
            binding
            for source in program.sources
            for text, bindings in source.attributes.items()
            if text.endswith(".epoch")
            for binding in bindings
            if not (
                source is home and getattr(function_of(home, binding.node), "name", "") in ("__init__", "set_epoch")
            )
        ]
        if not told:
            yield call


def _name_around(source: Source, node: ast.AST) -> str:
    function = function_of(source, node)
    return function.name if function is not None else ""


@rule(
    "LS102",
    "sampler-of-another-set",
    "the sampler is over another data set than the loader's",
    result="the loader reads the samples that another set's numbers name: a part of the data is never read, or read by "
    "chance",
    why="a sampler yields numbers from 0 to the length of its own data set; the loader takes them as its own",
    mend="sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, sampler=sampler)",
)
def sampler_of_another_set(program: Program) -> Iterator[Hit]:
    """A loader and its sampler whose data sets are two known, different ones."""
    for loader in loaders(program):
        dataset = of_loader(program, loader, "dataset")
        for sampler in samplers(program, loader):
            other = given(program, sampler, "dataset", 0) or given(program, sampler, "data_source", 0)
            known = last_name(sampler.func) in ("DistributedSampler", "RandomSampler", "SequentialSampler")
            known = known and not qualified(program, sampler.func).startswith("torchvision.")  # over another sampler
            if dataset is None or other is None or not known or definition(program, sampler.func):
                continue
            mine, theirs = origins(program, dataset), origins(program, other)
            if _whole_and_part(program, dataset, other) or _built_apart(program, dataset, other):
                yield Hit(loader, f"sampler over {ast.unparse(other)}, loader over {ast.unparse(dataset)}")
                continue
            made = all(isinstance(each, ast.Call) and "ampler" not in last_name(each.func) for each in [*mine, *theirs])
            if made and mine and theirs and not set(mine) & set(theirs):
                yield Hit(loader, f"sampler over {ast.unparse(other)}, loader over {ast.unparse(dataset)}")


def _whole_and_part(program: Program, one: ast.expr, other: ast.expr) -> bool:
    """x.dataset beside x, where x is a part that random_split or Subset cut."""
    for whole, part in ((one, other), (other, one)):
        if isinstance(whole, ast.Attribute) and whole.attr == "dataset" and ast.dump(whole.value) == ast.dump(part):
            return bool(made_by(program, part, "random_split", "Subset"))
    return False


def _built_apart(program: Program, one: ast.expr, other: ast.expr) -> bool:
    """Two names that are bound to a local function's results for different arguments, not only other transforms."""
    built = [bindings(program, each, each.id) if isinstance(each, ast.Name) else [] for each in (one, other)]
    if any(len(found) != 1 or found[0].path for found in built):
        return False
    first, second = (found[0].value for found in built)
    if not (isinstance(first, ast.Call) and isinstance(second, ast.Call)):
        return False
    same = callee(program, first) is not None and callee(program, first) is callee(program, second)
    if not same or len(first.args) != len(second.args):
        return False
    kept = [
        [ast.dump(each) for each in call.args]
        + sorted(ast.dump(each) for each in call.keywords if not re.search("transform|aug", each.arg or ""))
        for call in (first, second)
    ]
    return kept[0] != kept[1]


@rule(
    "LS103",
    "shuffle-beside-sampler",
    "shuffle=True beside a sampler",
    result="DataLoader raises ValueError: nothing is trained",
    why="a sampler already decides the order; DistributedSampler shuffles by itself",
    mend="DataLoader(dataset, sampler=sampler)",
)
def shuffle_beside_sampler(program: Program) -> Iterator[Hit]:
    """shuffle=True and a sampler in one call."""
    for loader in loaders(program):
        shuffle, sampler = of_loader(program, loader, "shuffle"), of_loader(program, loader, "sampler")
        if shuffle is None or sampler is None or not isinstance(shuffle, ast.Constant) or shuffle.value is not True:
            continue
        made = origins(program, sampler)
        known = [each for each in made if not (isinstance(each, ast.Constant) and each.value is None)]
        if known and all(isinstance(each, ast.Call) for each in known):
            yield Hit(loader)
