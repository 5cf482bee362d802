"""Rules about a loader and its sampler: whether they are over one data set, and agree about the order."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import argument, callee, default, definition, method, sites
from lockstep.commands.lint.origins import made_by, origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.roles import constant, given, loaders, of_loader, samplers
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.source import function_of


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
            if _same_length(program, dataset, theirs) or _same_length(program, other, mine):
                continue
            apart = _whole_and_part(program, dataset, other) or _built_apart(program, dataset, other)
            if apart or _taken_apart(program, dataset, other):
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


def _same_length(program: Program, whole: ast.expr, others: list[ast.AST]) -> bool:
    """Whether a set is a local class's around the other one, and as long as that."""
    for made in origins(program, whole):
        owner = definition(program, made.func) if isinstance(made, ast.Call) else None
        length = method(program, owner, "__len__") if isinstance(owner, ast.ClassDef) else None
        inside = [one for arg in made.args for one in origins(program, arg)] if isinstance(made, ast.Call) else []
        if length is not None and "len(self." in ast.unparse(length) and set(inside) & set(others):
            return True
    return False


def _taken_apart(program: Program, one: ast.expr, other: ast.expr) -> bool:
    """Two places of one tuple that is unpacked, or of one dictionary."""
    match one, other:
        case ast.Subscript(slice=ast.Constant(value=first)), ast.Subscript(slice=ast.Constant(value=second)):
            return first != second and ast.dump(one.value) == ast.dump(other.value)
        case ast.Name(), ast.Name():
            found = [bindings(program, each, each.id) for each in (one, other)]
            if any(len(each) != 1 or each[0].kind != "value" for each in found):
                return False
            return found[0][0].node is found[1][0].node and found[0][0].path != found[1][0].path
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
        shuffle = of_loader(program, loader, "shuffle")
        for name in ("sampler", "batch_sampler"):
            sampler = of_loader(program, loader, name)
            if shuffle is None or sampler is None:
                continue
            if constant(program, shuffle) is True and _is_sampler(program, sampler):
                yield Hit(loader)
                break
            yield from (Hit(call) for call in _told_both(program, shuffle, sampler))


def _is_sampler(program: Program, node: ast.expr) -> bool:
    made = origins(program, node)
    known = [each for each in made if not (isinstance(each, ast.Constant) and each.value is None)]
    return bool(known) and all(isinstance(each, ast.Call) for each in known)


def _told_both(program: Program, shuffle: ast.expr, sampler: ast.expr) -> Iterator[ast.Call]:
    """The calls that hand a function of the script's shuffle=True and a sampler, which it hands on to the loader."""
    names = [each.id for each in (shuffle, sampler) if isinstance(each, ast.Name)]
    function = function_of(program.owner[shuffle], shuffle)
    if len(names) < 2 or function is None:
        return
    known = [bindings(program, each, each.id) for each in (shuffle, sampler) if isinstance(each, ast.Name)]
    if any(len(found) != 1 or found[0].kind != "param" for found in known):
        return
    for site in sites(program, function):
        first, second = (argument(site, name) or default(function, name) for name in names)
        if first is None or second is None:
            continue
        if isinstance(first, ast.Constant) and first.value is True and _is_sampler(program, second):
            yield site.call
