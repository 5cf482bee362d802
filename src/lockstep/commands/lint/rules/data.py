"""The rule about a loader and its sampler: whether they are over one data set."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.instances import items, resolve
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.roles import given, loaders, of_loader, samplers
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.samples import samples_of
from lockstep.commands.lint.sites import argument, sites
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.tree import text_of
from lockstep.commands.lint.ways import Made, within


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
        if dataset is None:
            continue
        found = [hit for sampler in samplers(program, loader) for hit in _compared(program, loader, dataset, sampler)]
        yield from found or _in_one_call(program, loader, dataset) or _by_turns(program, loader, dataset)


def _compared(program: Program, place: ast.Call, dataset: ast.expr, sampler: ast.Call) -> Iterator[Hit]:
    """A loader's set, and that of a sampler which it is given."""
    if last_name(sampler.func) == "SubsetRandomSampler" and _counted_again(program, dataset, sampler):
        yield Hit(place, "numbers of the whole set in a part of it")
    other = given(program, sampler, "dataset", 0) or given(program, sampler, "data_source", 0)
    known = last_name(sampler.func) in ("DistributedSampler", "RandomSampler", "SequentialSampler")
    known = known and not qualified(program, sampler.func).startswith("torchvision.")  # over another sampler
    if other is None or not known or definition(program, sampler.func):
        return
    mine, theirs = origins(program, dataset), origins(program, other)
    if _same_length(program, dataset, theirs) or _same_length(program, other, mine):
        return
    keys = [samples_of(program, Made(each)) for each in (dataset, other)]
    if keys[0] is not None and keys[0] == keys[1]:
        return  # two ways to show the same pictures
    made = all(isinstance(each, ast.Call) and "ampler" not in last_name(each.func) for each in [*mine, *theirs])
    differ = made and bool(mine and theirs) and not set(mine) & set(theirs)
    apart = _whole_and_part(program, dataset, other) or _built_apart(program, dataset, other)
    if differ or apart or _taken_apart(program, dataset, other):
        yield Hit(place, f"sampler over {text_of(other)}, loader over {text_of(dataset)}")


def _in_one_call(program: Program, loader: ast.Call, dataset: ast.expr) -> list[Hit]:
    """The calls that hand a function of the script's a set, and a sampler of another one for the same loader."""
    sampler, function = of_loader(program, loader, "sampler"), function_of(program.owner[loader], loader)
    if function is None or not isinstance(dataset, ast.Name) or not isinstance(sampler, ast.Name):
        return []
    known = [bindings(program, each, each.id) for each in (dataset, sampler)]
    if any(len(found) != 1 or found[0].kind != "param" for found in known):
        return []
    found = list[Hit]()
    for site in sites(program, function):
        first, second = argument(site, dataset.id), argument(site, sampler.id)
        made = origins(program, second) if first is not None and second is not None else []
        if first is not None and len(made) == 1 and isinstance(made[0], ast.Call):
            found += _compared(program, site.call, first, made[0])
    return found


def _by_turns(program: Program, loader: ast.Call, dataset: ast.expr) -> Iterator[Hit]:
    """A loader that is made for each of some sets, with a sampler over one that another turn has the loader for."""
    sampler = of_loader(program, loader, "sampler")
    turns = list(_turns(program, loader)) if sampler is not None else []
    sets = [samples_of(program, Made(dataset, turn)) for turn in turns]
    for turn, own in zip(turns, sets, strict=True):
        for made in resolve(program, Made(sampler, turn)) if own is not None and sampler is not None else ():
            if not (isinstance(made.node, ast.Call) and last_name(made.node.func) == "DistributedSampler"):
                continue
            other = given(program, made.node, "dataset", 0)
            read = samples_of(program, within(made, other)) if other is not None else None
            if other is not None and read is not None and read != own and read in sets:
                yield Hit(loader, f"sampler over {text_of(other)}, loader over {text_of(dataset)}")
                return


def _turns(program: Program, node: ast.AST) -> Iterator[dict[ast.AST, Made]]:
    """What the nearest loop or comprehension around a place takes one after the other, where that is written out."""
    for outer in above(program.owner[node], node):
        if isinstance(outer, Function):
            return
        loops = [outer] if isinstance(outer, ast.For) else getattr(outer, "generators", [])
        if loops:
            yield from ({loops[0]: item} for item in items(program, Made(loops[0].iter)))
            return


def _counted_again(program: Program, dataset: ast.expr, sampler: ast.Call) -> bool:
    """DataLoader(Subset(x, part), sampler=SubsetRandomSampler(part)): the part's own numbers begin at 0."""
    chosen = given(program, sampler, "indices", 0)
    parts = made_by(program, dataset, "Subset")
    if not isinstance(chosen, ast.Name) or len(parts) != 1 or len(origins(program, dataset)) != 1:
        return False
    of = given(program, parts[0], "indices", 1)
    if not isinstance(of, ast.Name) or of.id != chosen.id:
        return False
    known = bindings(program, chosen, chosen.id)
    return len(known) == 1 and known == bindings(program, of, of.id)


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
        if length is not None and "len(self." in text_of(length) and set(inside) & set(others):
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
