"""The rule about who takes part in a collective."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.program import Program, last_name, qualified
from lockstep.commands.lint.ranks import guard, per_rank, side
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.hidden import hidden
from lockstep.commands.lint.source import Function, above, function_of

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
