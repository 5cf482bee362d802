"""Rules about samplers and loaders: who reads which samples."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import step_loops
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.roles import (
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
    if program.named.get("set_epoch") or lightning(program) or not program.whole:
        return
    around = step_loops(program)
    for loader, loops in training_loaders(program).items():
        if any(around[loop] for loop in loops):
            for sampler in sharding(program, loader):
                if constant(program, given(program, sampler, "shuffle", 3)) is not False:
                    yield Hit(sampler)
    handled = any(each.arg == "train_sampler" for call in program.calls for each in call.keywords)
    for call in program.named.get("run", []) if not handled else []:  # Ignite's engine
        if call.args and given(program, call, "max_epochs") is not None:
            for made in origins(program, call.args[0]):
                auto = isinstance(made, ast.Call) and last_name(made.func) == "auto_dataloader"
                if auto and isinstance(made, ast.Call) and constant(program, given(program, made, "shuffle")) is True:
                    yield Hit(made)


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
            made = all(isinstance(each, ast.Call) for each in [*mine, *theirs])
            if made and mine and theirs and not set(mine) & set(theirs):
                yield Hit(loader, f"sampler over {ast.unparse(other)}, loader over {ast.unparse(dataset)}")


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
        if made and all(isinstance(each, ast.Call) for each in made):
            yield Hit(loader)
