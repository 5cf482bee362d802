"""Rules about numbers that are told: means of means, and one rank's taken for all ranks'."""

import ast
import re
from collections.abc import Iterator, Mapping

from lockstep.commands.lint.around import function_of, statement_of
from lockstep.commands.lint.calls import callee
from lockstep.commands.lint.depends import depends
from lockstep.commands.lint.flow import added_up, is_telling, mentions, own_nodes, tainted
from lockstep.commands.lint.guards import guarded
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.places import evaluation_loops, loaders_of, step_loops
from lockstep.commands.lint.program import Program, qualified
from lockstep.commands.lint.readings import readings, sums_dropped
from lockstep.commands.lint.reduced import is_reduced
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.by_lightning import unsynced, watched
from lockstep.commands.lint.rules.compared import best_kept
from lockstep.commands.lint.rules.engine_state import told_from_state
from lockstep.commands.lint.rules.evaluation import shared_out
from lockstep.commands.lint.several import distributed
from lockstep.commands.lint.shares import reads
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.spread import Place, comprehended, places
from lockstep.commands.lint.told import in_objects, told_after, told_by_objects
from lockstep.commands.lint.tree import text_of, walk


def shared_loops(program: Program) -> Iterator[tuple[Loop, list[ast.Call]]]:
    """The loops over loaders of which each rank has its own part, in training and evaluation."""
    for loop in [*step_loops(program), *evaluation_loops(program)]:
        cut = [each for each in loaders_of(program, loop) if shared_out(program, each, loop)]
        if cut:
            yield loop, cut


@rule(
    "LS204",
    "told-unreduced",
    "one rank's own number is told as the training's",
    result="the epoch's loss is of 1/N of the samples, and jumps when N changes",
    why="each rank adds up its own part, and nothing adds the ranks' sums",
    mend="sums = torch.tensor([total, count], device=device)\ndist.all_reduce(sums)\nmean = (sums[0] / sums[1]).item()",
)
def told_unreduced(program: Program) -> Iterator[Hit]:
    """What a training loop over a shared-out loader adds up, printed or logged after it without a reduction."""
    if distributed(program):
        trained = step_loops(program)
        for loop, _ in shared_loops(program):
            if loop in trained and not is_reduced(program, loop):
                for call in [*told_after(program, loop), *told_by_objects(program, loop), *_told_far(program, loop)]:
                    if not _says_own(call):
                        yield Hit(call)
                        break
        for loop, _ in shared_loops(program):
            yield from _told_too_early(program, loop)
    for part, _, known in comprehended(program, training=True) if distributed(program) else []:
        if any(shared_out(program, each, part) for each in loaders_of(program, part)):
            yield from (Hit(call) for call in _told_in(known, part)[:1])
    yield from (Hit(call) for call in told_from_state(program, training=True) if not _says_own(call))
    yield from (Hit(call) for call in unsynced(program))
    yield from _metrics_apart(program)


def _told_far(program: Program, loop: Loop) -> Iterator[ast.Call]:
    """The calls that tell a loop's sums in functions that are handed them."""
    for place in places(program, loop):
        for call in place.nodes if place.far and place.function is not None else ():
            if (
                isinstance(call, ast.Call)
                and is_telling(call)
                and any(mentions(each, set(place.names)) for each in _given(call))
            ):
                yield call


def _told_in(known: list[Place], part: ast.comprehension) -> list[ast.Call]:
    """The calls that tell what these names hold, past a comprehension."""
    last = part.iter.end_lineno or 0
    return [
        call
        for place in known
        for call in place.nodes
        if isinstance(call, ast.Call) and is_telling(call) and (place.far or call.lineno > last)
        if any(mentions(each, set(place.names)) for each in _given(call)) and not _says_own(call)
    ]


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _told_too_early(program: Program, loop: Loop) -> Iterator[Hit]:
    """A number that was computed before the sums were reduced, and is told after."""
    for reading in readings(program, loop) if not sums_dropped(program, loop) else []:
        for call in walk(reading.node) if isinstance(reading.node, ast.Expr) else []:
            told = (
                isinstance(call, ast.Call) and is_telling(call) and any(reads(each, reading.own) for each in call.args)
            )
            if told and isinstance(call, ast.Call) and not _says_own(call) and guarded(program, call):
                yield Hit(call, "computed before the reduction")
                return


def _says_own(call: ast.Call) -> bool:
    """Whether what is told says that it is one rank's."""
    words = [each.value for each in walk(call) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    names = [each for each in walk(call) if isinstance(each, ast.FormattedValue)]
    text = " ".join(words) + " ".join(map(text_of, names))
    return bool(re.search(r"(local|rank|own|its)\b.{0,20}(loss|acc)|\brank\W", text, re.IGNORECASE))


def _metrics_apart(program: Program) -> Iterator[Hit]:
    """A torchmetrics object that is told not to reduce, and that nothing reduces by hand."""
    several = distributed(program) and not any(program.named.get(name) for name in ("sync", "sync_context", "unsync"))
    for call in program.calls if several else []:
        apart = constant(program, given(program, call, "sync_on_compute")) is False
        if apart and qualified(program, call.func).startswith("torchmetrics.") and not guarded(program, call):
            yield Hit(call, "sync_on_compute=False")


@rule(
    "LS205",
    "best-by-one-rank",
    "the best model is chosen by one rank's number",
    result="the kept weights are the best on 1/N of the test set; with N, another epoch's are kept",
    why="the compared number is of this rank's samples alone",
    mend="dist.all_reduce(sums)  # before the number is compared",
)
def best_by_one_rank(program: Program) -> Iterator[Hit]:
    """`if accuracy > best` with a number that evaluation made over its own part."""
    yield from watched(program)
    yield from _plateaus(program)
    compared = [each for source in program.sources for each in best_kept(source)]
    for loop, _ in shared_loops(program) if compared else []:
        function = function_of(program.owner[loop], loop)
        if is_reduced(program, loop):
            early = {each.node: each.own for each in readings(program, loop)}
            kept = _kept_early(program, early)
            for node in compared:
                above = statement_of(program.owner[node], node)
                if (above in early and reads(node, early[above])) or (kept and _reads_kept(program, node, kept)):
                    yield Hit(node, "computed before the reduction")
            continue
        names = tainted(own_nodes(program, loop), added_up(loop))
        mixed = any(map(_holds_others, places(program, loop)))
        of_object = [(method, known) for method, known, _ in in_objects(program, loop)]
        for node in compared:
            source = program.owner[node]
            if any(function_of(source, node) is method and mentions(node, known) for method, known in of_object):
                yield Hit(node)
                continue
            here = function_of(source, node) is function and program.owner[loop] is source and mentions(node, names)
            far = not mixed and any(
                function_of(source, node) is place.function and node in place.nodes and mentions(node, set(place.names))
                for place in places(program, loop)
            )
            if here or far or _comes_from(program, node, loop):
                yield Hit(node)


def _holds_others(place: Place) -> bool:
    """Whether a dictionary that is written out holds these sums beside other numbers: which is compared isn't told."""
    for node in place.nodes:
        if isinstance(node, ast.Dict):
            known = [each for each in node.values if not isinstance(each, ast.Constant | ast.Name | ast.Attribute)]
            if {mentions(each, set(place.names)) for each in known} == {True, False}:
                return True
    return False


def _kept_early(program: Program, early: Mapping[ast.stmt, frozenset[str]]) -> set[str]:
    """The attributes that are given a rank's own number before the ranks' sums are there, and nothing after it."""
    found = set()
    for node, own in early.items():
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value) if reads(
                value, own
            ):
                bound = [
                    each
                    for source in program.sources
                    for key, known in source.attributes.items()
                    if key.endswith(f".{name}")
                    for each in known
                ]
                if all(each.node is node or isinstance(each.value, ast.Constant) for each in bound):
                    found.add(name)
    return found


def _reads_kept(program: Program, node: ast.Compare, names: set[str]) -> bool:
    return depends(program, node, lambda each: isinstance(each, ast.Attribute) and each.attr in names)


def _plateaus(program: Program) -> Iterator[Hit]:
    """ReduceLROnPlateau that is stepped by what a loop over a rank's own part gave: the ranks' rates part."""
    steps = [
        call
        for call in program.named.get("step", [])
        if call.args and isinstance(call.func, ast.Attribute) and made_by(program, call.func.value, "ReduceLROnPlateau")
    ]
    for loop, _ in shared_loops(program) if steps else []:
        if is_reduced(program, loop):
            continue
        function = function_of(program.owner[loop], loop)
        names = tainted(own_nodes(program, loop), added_up(loop))
        for call in steps:
            here = function_of(program.owner[call], call) is function and mentions(call.args[0], names)
            if here or _comes_from(program, call.args[0], loop):
                yield Hit(call, "ReduceLROnPlateau: each rank's rate falls by its own number")


def _comes_from(program: Program, node: ast.AST, loop: Loop) -> bool:
    """Whether a value comes from what a loop's function returns of the loop's own numbers."""
    function = function_of(program.owner[loop], loop)
    if function is None:
        return False
    bound = {each.id for each in walk(loop) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    names = tainted(own_nodes(program, loop), added_up(loop) | bound)
    values = [each.value for each in walk(function) if isinstance(each, ast.Return | ast.Yield) and each.value]
    if not any(mentions(each, names) for each in values):
        return False
    return depends(program, node, lambda each: isinstance(each, ast.Call) and callee(program, each) is function)
