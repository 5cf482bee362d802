"""Rules about the process group: its life, who takes part in a collective, and waits in each step."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition, sites
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import guard, per_rank, side
from lockstep.commands.lint.roles import library, wrapped
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.hidden import hidden
from lockstep.commands.lint.source import Function, Source, above, function_of, statement_of

_COLLECTIVES = {
    "all_reduce",
    "all_gather",
    "reduce",
    "broadcast",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "reduce_scatter",
    "all_to_all",
    "scatter",
    "gather",
    "all_gather_into_tensor",
    "allreduce",
    "wait_for_everyone",
    "gather_for_metrics",
    "monitored_barrier",
    "allgather",
    "reduce_scatter_tensor",
}


_ASKING = ("torch.distributed.get_rank", "torch.distributed.get_world_size", "torch.distributed.barrier")


def collectives(program: Program) -> list[ast.Call]:
    """The calls in which all ranks of a group have to take part."""
    found = []
    for name in _COLLECTIVES:
        for call in program.named.get(name, []):
            text = qualified(program, call.func)
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            managed = (
                re.search(r"accelerator|fabric|(^|\.)hvd$|idist|strategy", owner)
                and definition(program, call.func) is None
            )
            if (text.startswith(("torch.distributed.", "horovod.", "ignite.distributed.")) or managed) and not (
                owner.endswith("Function") or text.startswith(("torch.distributed.nn.",))
            ):
                found.append(call)
    return found


@rule(
    "LS306",
    "init-without-end",
    "the process group is never destroyed",
    result="with NCCL a warning at each end, and now and then a hang or an abort after the last line of the training",
    why="init_process_group starts threads that destroy_process_group ends",
    mend="dist.destroy_process_group()  # the last line of what each rank runs",
)
def init_without_end(program: Program) -> Iterator[Hit]:
    """init_process_group in a program that never says destroy_process_group."""
    if (
        any("destroy_process_group" in source.text for source in program.sources)
        or library(program, "deepspeed")
        or not program.whole
    ):
        return
    calls = [each for each in program.named.get("init_process_group", []) if definition(program, each.func) is None]
    for call in calls[:1]:
        source = program.owner[call]
        started = any(program.owner[each] is program.root for each in calls) or len(program.sources) > 1
        if started and (_is_program(program) or source is program.root):
            yield Hit(call)


def _is_program(program: Program) -> bool:
    return "__main__" in program.root.text


@rule(
    "LS307",
    "used-before-init",
    "the process group is used before it is there",
    result="ValueError: Default process group has not been initialized, in each process",
    why="the call stands before init_process_group",
    mend="dist.init_process_group(backend)\nrank = dist.get_rank()",
)
def used_before_init(program: Program) -> Iterator[Hit]:
    """A collective, get_rank() or DDP above init_process_group in one block."""
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
                    yield Hit(call)
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
                    yield Hit(call)
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
                yield Hit(call)


def _before_horovod(program: Program) -> Iterator[Hit]:
    """hvd.rank() above hvd.init()."""
    asked = [call for call in program.calls if ast.unparse(call.func) in ("hvd.rank", "hvd.size", "hvd.local_rank")]
    for init in program.named.get("init", []) if library(program, "horovod") else []:
        home = program.owner[init]
        for call in asked:
            same = program.owner[call] is home and function_of(home, call) is function_of(home, init)
            if same and call.lineno < init.lineno and ast.unparse(init.func) == "hvd.init":
                yield Hit(call)


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


@rule(
    "LS308",
    "collective-on-some-ranks",
    "a collective that only some ranks reach",
    result="the ranks that are there wait for the others until the timeout (10 or 30 minutes), and fail; or a later "
    "call is answered wrongly",
    why="a collective ends when all ranks of the group have called it",
    mend="dist.all_reduce(x)  # on all ranks\nif rank == 0:\n    print(x)",
)
def collective_on_some_ranks(program: Program) -> Iterator[Hit]:
    """A collective under `if rank == 0`, with none of its name for the other ranks."""
    known = [*collectives(program), *hidden(program)]
    for call in known:
        condition = _condition(program, call)
        if condition is None or any(each.arg == "group" for each in call.keywords):
            continue
        if not _met(program, call, condition):
            yield Hit(call)
    for call in program.calls:
        function = callee(program, call)
        outer = guard(program, call) if function is not None else None
        if outer is not None and function is not None and per_rank(program, call):
            inner = [each for each in known if each in set(ast.walk(function)) and _condition(program, each) is None]
            bare = [each for each in inner if not _conditional(program, each)]
            met = isinstance(outer, ast.If) and _met(program, call, outer)
            if bare and not met and _exclusive(outer):
                yield Hit(call, f"{function.name}() calls {last_name(bare[0].func)}")


def _conditional(program: Program, call: ast.Call) -> bool:
    """Whether a condition stands above a call in its function, but for one that asks whether there are processes."""
    for each in above(program.owner[call], call):
        if isinstance(each, Function):
            return False
        several = isinstance(each, ast.If) and re.search(r"is_initialized\(\)$|world_size > 1$", ast.unparse(each.test))
        if isinstance(each, ast.If | ast.IfExp | ast.Try) and not several:
            return True
    return False


def _condition(program: Program, call: ast.Call) -> ast.If | None:
    found = guard(program, call)
    return found if isinstance(found, ast.If) and _exclusive(found) else None


def _exclusive(condition: ast.If | ast.IfExp) -> bool:
    """Whether a condition is about ranks alone, not about there being several (`world_size > 1 and ...`)."""
    names = ast.unparse(condition.test)
    return not re.search(r"world_size|is_initialized|distributed|>= ?0|== ?-1|num_processes|-1|is_available", names)


def _met(program: Program, call: ast.Call, condition: ast.If) -> bool:
    """Whether the ranks that the condition keeps out call the same collective: in the other branch, or elsewhere."""
    name = last_name(call.func)
    source = program.owner[call]
    mine = condition.body if any(call in set(ast.walk(each)) for each in condition.body) else condition.orelse
    rest = condition.orelse if mine is condition.body else condition.body
    if mine and any(
        isinstance(each, ast.Call) and last_name(each.func) == name for part in rest for each in ast.walk(part)
    ):
        return True
    function = function_of(source, call)
    for other in program.named.get(name, []):  # `if rank != 0: barrier()` ... `if rank == 0: barrier()`
        if other is not call and last_name(other.func) == name and function_of(program.owner[other], other) is function:
            theirs = guard(program, other)
            if (
                isinstance(theirs, ast.If)
                and theirs is not condition
                and side(program, theirs.test) == -side(program, condition.test)
            ):
                return True
    early = not any(call in set(ast.walk(part)) for part in [*condition.body, *condition.orelse])
    return early and any(isinstance(each, ast.Call) and last_name(each.func) == name for each in ast.walk(condition))
