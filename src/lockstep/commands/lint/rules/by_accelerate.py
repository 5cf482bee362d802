"""What rules look for in schedules that Accelerate prepares, which it steps once for each process."""

import ast

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.rule import Hit
from lockstep.commands.lint.rules.lengths import Lengths
from lockstep.commands.lint.rules.units import is_loader, unit
from lockstep.commands.lint.several import library
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.tree import text_of, walk

_NAMES = ("prepare", "prepare_scheduler")


def steps_of_all(
    program: Program, scheduler: ast.Call, found: Lengths, in_batch: bool, in_epoch: list[ast.Call]
) -> Hit | None:
    """A prepared schedule whose length is one process's own, and one of all processes' batches that is not prepared."""
    told = ("split_batches", "step_scheduler_with_optimizer")
    if not library(program, "accelerate") or any(each.arg in told for call in program.calls for each in call.keywords):
        return None
    reason = "prepared by Accelerate, which steps it once for each process"
    lengths = [one for size in found.sizes for one in _lengths(program, size)]
    counted = [each for each in found.units if each.batches] or list(found.units)
    worlds = {each.world for each in counted}
    own = {_is_own(program, one) for one in lengths}
    if scheduler in _prepared(program):
        if in_batch and lengths and (worlds == {-1} or (worlds == {0} and own == {True})):
            return Hit(scheduler, reason)
        plain = not any(each.vague or each.batches or each.world for each in found.units)
        if in_epoch and not in_batch and not lengths and plain:
            return Hit(in_epoch[0], reason)
        return None
    whole = any(each.epochs == 1 and each.batches == 1 and not (each.vague or each.samples) for each in counted)
    of_all = whole and worlds == {0} and own == {False} and all(_taken(program, one) for one in lengths)
    if in_batch and not in_epoch and of_all and not found.converted and not _spread(program):
        return Hit(scheduler, "made for all processes' batches, stepped for one process's")
    return None


def _taken(program: Program, length: ast.Call) -> bool:
    """Whether the loader of a length is given to prepare()."""
    loader = set(origins(program, length.args[0]))
    return any(loader & set(origins(program, each)) for call in program.named.get("prepare", []) for each in call.args)


def _spread(program: Program) -> bool:
    """Whether prepare() is given what is not written out, which may hold the schedule."""
    calls = [call for name in _NAMES for call in program.named.get(name, [])]
    return any(isinstance(each, ast.Starred) for call in calls for each in call.args)


@remembered
def _prepared(program: Program) -> frozenset[ast.AST]:
    """What is given to prepare()."""
    return frozenset(
        made
        for name in _NAMES
        for call in program.named.get(name, [])
        for each in call.args
        for made in origins(program, each)
    )


def _lengths(program: Program, size: ast.AST, depth: int = 0) -> list[ast.Call]:
    """The len(loader) that enter a length."""
    found = []
    for node in walk(size):
        if (
            isinstance(node, ast.Call)
            and last_name(node.func) == "len"
            and node.args
            and is_loader(program, node.args[0])
        ):
            found.append(node)
        elif isinstance(node, ast.Name | ast.Attribute) and depth < 6 and unit(program, node).batches:
            found += [
                one
                for made in origins(program, node)
                if made is not node and not (isinstance(made, ast.Call) and is_loader(program, made))
                for one in _lengths(program, made, depth + 1)
            ]
    return list(dict.fromkeys(found))


def _is_own(program: Program, length: ast.Call) -> bool | None:
    """Whether a loader's length is read once it is prepared, and is one process's own; None: that can't be told."""
    loader = set(origins(program, length.args[0]))
    calls = [
        call
        for call in program.named.get("prepare", [])
        if any(loader & set(origins(program, each)) for each in call.args)
    ]
    if not calls:
        return False
    found = {_after(program, length, call) for call in calls}
    return found.pop() if len(found) == 1 else None


def _after(program: Program, node: ast.expr, call: ast.Call, depth: int = 0) -> bool | None:
    home = program.owner[call]
    if program.owner[node] is home and function_of(home, node) is function_of(home, call):
        return node.lineno > (call.end_lineno or 0)
    for each in walk(node):
        if isinstance(each, ast.Name) and any(binding.value is call for binding in bindings(program, each, each.id)):
            return True
        if isinstance(each, ast.Attribute):
            known = program.owner[node].attributes.get(text_of(each), [])
            if known and all(binding.value is call for binding in known):
                return True
    function = function_of(program.owner[node], node)
    found = (
        {_after(program, site.call, call, depth + 1) for site in sites(program, function)}
        if function and depth < 4
        else set()
    )
    return found.pop() if len(found) == 1 else None
