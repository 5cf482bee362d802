"""The rule about collectives that a part of the ranks alone comes to."""

import ast
import re
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.guards import guarded, kept_out, only_on_one, per_rank
from lockstep.commands.lint.makers import made_by
from lockstep.commands.lint.places import backwards, inside
from lockstep.commands.lint.program import Program, bindings, last_name, qualified, remembered
from lockstep.commands.lint.ranks import side
from lockstep.commands.lint.reaching import reaching
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.collectives import collectives
from lockstep.commands.lint.rules.hidden import hidden
from lockstep.commands.lint.several import wrapped
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.splitting import left_by_some, splits
from lockstep.commands.lint.tree import text_of, walk


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
    """A collective, or a function that runs one, under `if rank == 0`, with none for the other ranks."""
    known = _known(program)
    for call in program.calls:
        outer = kept_out(program, call)
        inner = outer is not None and call not in known
        function = _started(program, call) if inner else None
        if outer is None and (function := _by_decorator(program, call)) is not None:
            yield Hit(call, f"{function.name}() calls {_collective(program, function)}")
        if outer is None or not _exclusive(program, outer):
            continue
        if call in known and not _met(program, call, outer):
            yield Hit(call)
        name = _collective(program, function) if function is not None and call not in known else ""
        if function is not None and name and per_rank(program, call) and not _met(program, call, outer):
            yield Hit(call, f"{function.name}() calls {name}")
    yield from (Hit(each, "one rank leaves the loop, the others go on") for each in _leaving(program))


def _leaving(program: Program) -> Iterator[ast.stmt]:
    """`if rank == 0: ... break` of a loop whose passes all ranks have to take together."""
    for source in program.sources if _known(program) else ():
        for node in source.of(ast.Break):
            loop = left_by_some(program, node)
            if loop is not None and not guarded(program, loop):
                together = wrapped(program) and any(each in backwards(program) for each in inside(program, loop))
                if together or any(_is_collective(program, each) for part in loop.body for each in walk(part)):
                    yield node


@remembered
def _known(program: Program) -> set[ast.Call]:
    """The calls that all ranks have to take part in: those of the whole group."""
    found = {*collectives(program), *hidden(program), *wrapped(program)}
    found |= {call for call in program.named.get("new_group", []) if _of_torch(program, call)}
    for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter"):
        found |= {call for call in program.named.get(name, []) if _of_torch(program, call)}
    for call in program.named.get("state_dict", []):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is not None and made_by(program, owner, "FullyShardedDataParallel", "FSDP"):
            found.add(call)
    return {each for each in found if not _of_part(program, each)}


def _of_torch(program: Program, call: ast.Call) -> bool:
    return qualified(program, call.func).startswith("torch.distributed.") and definition(program, call.func) is None


def _of_part(program: Program, call: ast.Call) -> bool:
    """Whether a collective is a part's of the ranks: given a group, or a mesh."""
    if last_name(call.func) == "new_group":
        return False
    given = [
        each.value
        for each in call.keywords
        if each.arg in ("group", "process_group", "pg", "device_mesh", "process_set")
    ]
    given = [each for each in given if not isinstance(each, ast.Constant)]
    return bool(given) or any(
        re.search(r"(^|_)(group|pg|mesh|comm)$", last_name(each)) or made_by(program, each, "new_group")
        for each in call.args
        if isinstance(each, ast.Name | ast.Attribute)
    )


def _started(program: Program, call: ast.Call) -> Function | None:
    """The local function that a call runs."""
    function = callee(program, call)
    return (
        function if function is not None and not any(isinstance(each, ast.Yield) for each in walk(function)) else None
    )


def _by_decorator(program: Program, call: ast.Call) -> Function | None:
    """The function with a collective that is called through what a decorator of one rank made of it."""
    made = [call.func]
    if isinstance(call.func, ast.Name):
        found = reaching(program, call.func, bindings(program, call.func, call.func.id))
        made = [each.value for each in found if each.kind == "value" and isinstance(each.value, ast.expr)]
    for each in made:
        if isinstance(each, ast.Call) and len(each.args) == 1:
            inner = definition(program, each.args[0])
            if isinstance(inner, Function) and only_on_one(program, each.func) and _collective(program, inner):
                return inner
    return None


@remembered
def _collective(program: Program, function: Function) -> str:
    """The name of a collective that a function runs whenever it is called, by itself or by what it calls."""
    return _runs(program, function, set())


def _runs(program: Program, function: Function, seen: set[Function]) -> str:
    if function in seen or len(seen) > 60:
        return ""
    seen.add(function)
    source, known = program.owner[function], _known(program)
    for each in (node for part in function.body for node in walk(part)):
        if not isinstance(each, ast.Call) or function_of(source, each) is not function:
            continue
        if each in known and not _conditional(program, each):
            return last_name(each.func)
        inner = callee(program, each) if each not in known and not _conditional(program, each) else None
        if inner is not None and any(only_on_one(program, one) for one in inner.decorator_list):
            inner = None
        if inner is not None and (name := _runs(program, inner, seen)):
            return name
    return ""


def _conditional(program: Program, call: ast.Call) -> bool:
    """Whether a condition stands above a call in its function, but for one that asks whether there are processes."""
    source, inner = program.owner[call], call
    node: ast.AST = inner
    for each in above(source, call):
        if isinstance(each, Function):
            return _left_before(each, node)
        if isinstance(each, ast.Lambda | ast.Try | ast.IfExp | ast.BoolOp):
            return True
        if isinstance(each, ast.If) and node is not each.test:
            several = re.search(
                r"is_(dist_)?(avail\w*|initialized)\(?\w*\)?$|world(_size)?(\(\))? > 1$|distributed$",
                text_of(each.test),
            )
            if not several or node in each.orelse:
                return True
        node = each
    return False


def _left_before(function: Function, statement: ast.AST) -> bool:
    """Whether a condition may leave a function above a statement of its body, but for a run of one process."""
    place = function.body.index(statement) if isinstance(statement, ast.stmt) and statement in function.body else 0
    for each in function.body[:place]:
        leaves = isinstance(each, ast.If) and any(isinstance(one, ast.Return | ast.Raise) for one in walk(each))
        if leaves and isinstance(each, ast.If):
            text = text_of(each.test)
            alone = re.search(
                r"not .*(is_(dist_)?(avail\w*|initialized)|distributed)|world\w*(\(\))? (==|<=|<) [12]$", text
            )
            if not alone:
                return True
    return False


def _exclusive(program: Program, outer: ast.AST) -> bool:
    """Whether a condition divides the ranks of one run, and not runs of one process from those of several."""
    match outer:
        case ast.If(test=test) | ast.IfExp(test=test):
            return splits(program, test)
        case ast.BoolOp(values=[*before, _]):
            return any(splits(program, each) for each in before)
        case ast.While(test=test):
            return splits(program, test)
        case ast.Match():
            return True
    return isinstance(outer, Function)


def _met(program: Program, call: ast.Call, outer: ast.AST) -> bool:
    """Whether the ranks that a condition keeps out run a collective as well: in its other branch, or elsewhere."""
    if isinstance(outer, ast.IfExp):
        return any(_is_collective(program, each) for each in walk(outer.orelse))
    if isinstance(outer, ast.Match):
        cases = [each for each in outer.cases if call not in walk(each)]
        return any(_is_collective(program, each) for case in cases for each in walk(case))
    if not isinstance(outer, ast.If):
        return False
    within = [any(call is each for part in block for each in walk(part)) for block in (outer.body, outer.orelse)]
    early = not any(within)
    rest = outer.body if early or within[1] else outer.orelse
    if any(_is_collective(program, each) for part in rest for each in walk(part)):
        return True
    name, function = last_name(call.func), function_of(program.owner[call], call)
    for other in program.named.get(name, []):  # `if rank != 0: barrier()` ... `if rank == 0: barrier()`
        theirs = kept_out(program, other) if other is not call else None
        if isinstance(theirs, ast.If) and theirs is not outer and function_of(program.owner[other], other) is function:
            sides = side(program, theirs.test), side(program, outer.test)
            turned = [_early(one, place) for one, place in ((theirs, other), (outer, call))]
            if sides[0] * (-1 if turned[0] else 1) == -sides[1] * (-1 if turned[1] else 1):
                return True
    return False


def _early(condition: ast.If, call: ast.Call) -> bool:
    """Whether a call runs where a condition is false: in its other branch, or below where it leaves."""
    return not any(call is each for part in condition.body for each in walk(part))


def _is_collective(program: Program, node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    function = callee(program, node)
    return node in _known(program) or (function is not None and bool(_collective(program, function)))
