"""Rules about a loader and its sampler: whether they are over one data set, and agree about the order."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.origins import made_by, origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.roles import (
    given,
    loaders,
    of_loader,
    samplers,
)
from lockstep.commands.lint.rule import Hit, rule


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
