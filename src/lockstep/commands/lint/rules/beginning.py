"""The rule about what comes before the process group."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.collectives import collectives
from lockstep.commands.lint.rules.early import too_early
from lockstep.commands.lint.several import library, wrapped
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Source
from lockstep.commands.lint.tree import text_of

_ASKING = ("torch.distributed.get_rank", "torch.distributed.get_world_size", "torch.distributed.barrier")


@rule(
    "LS307",
    "used-before-init",
    "the process group is used before it is there",
    result="ValueError: Default process group has not been initialized, in each process",
    why="the call stands before init_process_group",
    mend="dist.init_process_group(backend)\nrank = dist.get_rank()",
)
def used_before_init(program: Program) -> Iterator[Hit]:
    """A collective, get_rank() or DDP above init_process_group, in one block or by the order of calls."""
    told = set[ast.AST]()
    for call in [*_in_a_block(program), *too_early(program)]:
        if call not in told:
            told.add(call)
            yield Hit(call)


def _in_a_block(program: Program) -> Iterator[ast.Call]:
    users = [
        *collectives(program),
        *wrapped(program),
        *(
            each
            for name in ("get_rank", "get_world_size", "DistributedSampler")
            for each in program.named.get(name, [])
            if not (name == "DistributedSampler" and len(each.args) + len(each.keywords) > 2)
        ),
    ]
    yield from _before_horovod(program)
    for init in program.named.get("init_process_group", []):
        source = program.owner[init]
        if definition(program, init.func) is not None:
            continue
        function = function_of(source, init)
        started = [site.call for site in sites(program, function) if not site.spawned] if function is not None else []
        for place in started:  # a function that starts the group, called too late
            outer = function_of(program.owner[place], place)
            for call in users:
                beside = program.owner[call] is program.owner[place] and function_of(program.owner[call], call) is outer
                asks = _asks(program, call) or any(
                    isinstance(each, ast.If) for each in above(program.owner[place], place)
                )
                ours = qualified(program, call.func).startswith("torch.")
                if (
                    beside
                    and ours
                    and outer is not None
                    and call.lineno < place.lineno
                    and not asks
                    and len(started) == 1
                ):
                    yield call
        if function is not None:
            for call in users:
                top = function_of(program.owner[call], call) is None and program.owner[call] is program.root
                if (
                    top
                    and qualified(program, call.func) in _ASKING
                    and not _asks(program, call)
                    and not any(
                        site.call.lineno < call.lineno and function_of(program.owner[site.call], site.call) is None
                        for site in sites(program, function)
                    )
                ):
                    yield call
        for call in users:
            same = program.owner[call] is source and function_of(source, call) is function
            torchs = last_name(call.func) != "get_rank" or qualified(program, call.func).startswith("torch.distributed")
            if (
                same
                and torchs
                and call.lineno < init.lineno
                and not _asks(program, call)
                and _both_run(program, call, init)
            ) or (same and call.lineno < init.lineno and _beside(source, call, init) and call in collectives(program)):
                yield call


def _before_horovod(program: Program) -> Iterator[ast.Call]:
    """hvd.rank() above hvd.init()."""
    asked = [call for call in program.calls if text_of(call.func) in ("hvd.rank", "hvd.size", "hvd.local_rank")]
    for init in program.named.get("init", []) if library(program, "horovod") else []:
        home = program.owner[init]
        for call in asked:
            same = program.owner[call] is home and function_of(home, call) is function_of(home, init)
            if same and call.lineno < init.lineno and text_of(init.func) == "hvd.init":
                yield call


def _beside(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether two calls' statements stand in one block, one above the other."""
    first, second = statement_of(source, one), statement_of(source, other)
    return source.parents[first] is source.parents[second] and isinstance(source.parents[first], ast.If)


def _asks(program: Program, call: ast.Call) -> bool:
    """Whether a condition above asks whether the group is there, or another library started it."""
    for outer in above(program.owner[call], call):
        if isinstance(outer, ast.If | ast.IfExp | ast.Try | ast.Lambda):
            return True
    return False


def _both_run(program: Program, one: ast.Call, other: ast.Call) -> bool:
    """Whether two calls stand in blocks that run one after the other."""
    inits = program.named.get("init_process_group", [])
    earlier = any(each.lineno < one.lineno and each is not other for each in inits)
    return not earlier and not any(isinstance(each, ast.If) for each in above(program.owner[other], other))
