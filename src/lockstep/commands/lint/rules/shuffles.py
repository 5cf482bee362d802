"""The rule about shuffle=True beside a sampler, in one call or in what a call of the script's own leads to."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import class_of, function_of
from lockstep.commands.lint.instances import constant_of, resolve
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, qualified
from lockstep.commands.lint.reaching import exclude
from lockstep.commands.lint.roles import constant, loaders, of_loader
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.mending import without_shuffle
from lockstep.commands.lint.sites import argument, default, sites
from lockstep.commands.lint.tree import text_of
from lockstep.commands.lint.ways import ways, within


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
    for loader in [*loaders(program), *_of_subclasses(program)]:
        shuffle = of_loader(program, loader, "shuffle")
        for name in ("sampler", "batch_sampler"):
            sampler = of_loader(program, loader, name)
            if shuffle is None or sampler is None or _one_of_both(program, shuffle, sampler):
                continue
            known = constant(program, shuffle) is True and _is_sampler(program, sampler)
            if known or _asks_for_it(program, shuffle, sampler):
                yield Hit(loader, "", without_shuffle(program, loader, sampler))
                break
            told = list(_told_both(program, shuffle, sampler))
            yield from (Hit(call) for call in told)
            if not told and _shuffled_in_one_way(program, loader, shuffle, sampler):
                yield Hit(loader)
                break


def _one_of_both(program: Program, shuffle: ast.expr, sampler: ast.expr) -> bool:
    """Whether a dictionary of arguments gets the one or the other: kw["sampler"] = ..., else kw["shuffle"] = True."""
    homes = [program.owner.get(each) for each in (shuffle, sampler)]
    return homes[0] is not None and homes[0] is homes[1] and exclude(homes[0], shuffle, sampler)


def _of_subclasses(program: Program) -> Iterator[ast.Call]:
    """super().__init__(...) of a local class of loaders."""
    for call in program.named.get("__init__", []):
        owner = class_of(program.owner[call], call)
        above = call.func.value if isinstance(call.func, ast.Attribute) else None
        inherits = isinstance(above, ast.Call) and last_name(above.func) == "super"
        bases = owner.bases if owner is not None and inherits else []
        if any(qualified(program, base).endswith("utils.data.DataLoader") for base in bases):
            yield call


def _asks_for_it(program: Program, shuffle: ast.expr, sampler: ast.expr) -> bool:
    """`shuffle=sampler is not None`, and `shuffle=bool(sampler)`: true just where there is a sampler."""
    text = text_of(sampler)
    for made in origins(program, shuffle):
        match made:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                found = text_of(left) == text
            case ast.Call(func=ast.Name(id="bool"), args=[inner]):
                found = text_of(inner) == text
            case _:
                found = False
        if not found:
            return False
    return isinstance(sampler, ast.Name | ast.Attribute) and not isinstance(shuffle, ast.Constant)


def _shuffled_in_one_way(program: Program, loader: ast.Call, shuffle: ast.expr, sampler: ast.expr) -> bool:
    """Whether a call of the function around a loader makes it shuffle beside a sampler."""
    for way in ways(program, loader):
        made = [each.node for each in resolve(program, within(way, sampler))]
        known = bool(made) and all(isinstance(each, ast.Call) for each in made)
        if known and constant_of(program, within(way, shuffle)) is True:
            return True
    return False


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
