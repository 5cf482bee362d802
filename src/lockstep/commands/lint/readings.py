"""Where a rank's own numbers are read after some of a loop's sums have been reduced: here, in callers, in callees."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.flow import added_up, own_nodes, reduces, root_name
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.results import returns
from lockstep.commands.lint.shares import Reading, State, follow, gone_through, reads
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Loop, Source
from lockstep.commands.lint.spread import bound_to, handed
from lockstep.commands.lint.told import alike
from lockstep.commands.lint.tree import children, walk

_FAR = 3  # calls and returns followed in a row
_MOST = 200  # readings of one loop


@remembered
def readings(program: Program, loop: Loop) -> list[Reading]:
    """The statements after a loop, and below a first reduction of what it added up, in the loop's own function.

    Empty where the loop reduces within its passes. In doubt a name counts as reduced.
    """
    if any(reduces(program, each) for each in inside(program, loop)):
        return []
    state = State(added_up(loop) - alike(loop))
    follow(program, loop, state)
    function = function_of(program.owner[loop], loop)
    known = [] if state.reduced or function is None else returns(program, function)
    if any(each is not None and reads(each, frozenset(state.own)) for each in known) and function is not None:
        for site in sites(program, function)[:4]:
            there = State(bound_to(program, site.call))
            follow(program, statement_of(program.owner[site.call], site.call), there)
            state.read += there.read
    return _gone_on(program, state.read)


def _gone_on(program: Program, known: list[Reading]) -> list[Reading]:
    """These readings, and those of what they hand to a local function, or return to a caller."""
    found, waiting, seen = list(known), [(each, 0) for each in known], set[tuple[ast.AST, frozenset[str]]]()
    while waiting and len(found) < _MOST:
        one, far = waiting.pop(0)
        for node, names, inner in [*_handed_on(program, one), *_returned(program, one)] if far < _FAR else []:
            if (node, names) not in seen:
                seen.add((node, names))
                state = State(set(names), reduced=True)
                if inner:
                    gone_through(program, inner, state)
                else:
                    follow(program, node, state)
                found += state.read
                waiting += [(each, far + 1) for each in state.read]
    return found


_Next = tuple[ast.stmt, frozenset[str], list[ast.stmt]]  # a statement, the own names below it; a function's body


def _handed_on(program: Program, one: Reading) -> Iterator[_Next]:
    """The functions that a statement hands own numbers to."""
    given = handed(program)
    compound = hasattr(one.node, "body")
    parts = [each for each in children(one.node) if isinstance(each, ast.expr)] if compound else [one.node]
    for call in [each for part in parts for each in walk(part) if isinstance(each, ast.Call)]:
        for value in [*call.args, *(each.value for each in call.keywords)]:
            for site, parameter in given.get(value, ()) if reads(value, one.own) else ():
                yield site.function.body[0], frozenset({parameter}), site.function.body


def _returned(program: Program, one: Reading) -> Iterator[_Next]:
    """The callers that a function returns own numbers to: by themselves, in a tuple, at keys of a dictionary."""
    value = one.node.value if isinstance(one.node, ast.Return) else None
    function = function_of(program.owner[one.node], one.node)
    for site in sites(program, function)[:4] if function is not None and value is not None else []:
        statement = statement_of(program.owner[site.call], site.call)
        targets = statement.targets if isinstance(statement, ast.Assign) and statement.value is site.call else []
        names = set[str]()
        match value, targets:
            case ast.Tuple(elts=parts), [ast.Tuple(elts=into)] if len(parts) == len(into):
                names = {root_name(each) for each, part in zip(into, parts, strict=True) if reads(part, one.own)}
            case ast.Dict(keys=keys, values=parts), [ast.Name(id=name)]:
                own = [key for key, part in zip(keys, parts, strict=True) if reads(part, one.own)]
                names = {f"{name}[{each.value!r}]" for each in own if isinstance(each, ast.Constant)}
            case (ast.Tuple() | ast.Dict() | ast.List(), _):
                pass
            case _:
                names = bound_to(program, site.call)
        if names - {""}:
            yield statement, frozenset(names - {""}), []


def in_function(program: Program, loop: Loop) -> Iterator[Reading]:
    """The readings of a loop that stand in its own function."""
    function = function_of(program.owner[loop], loop)
    for each in readings(program, loop):
        if function_of(program.owner[loop], each.node) is function:
            yield each


@remembered
def sums_dropped(program: Program, loop: Loop) -> list[ast.Call]:
    """dist.all_reduce(t), where t was made of a loop's sums; below, these are read, and t is not."""
    known = list(in_function(program, loop))
    found = list[ast.Call]()
    source = program.owner[loop]
    for call in own_nodes(program, loop) if known else []:
        if not isinstance(call, ast.Call) or not isinstance(source.parents[call], ast.Expr) or not call.args:
            continue
        into, given = call.args[0], call.args[1 if last_name(call.func).startswith("all_gather") else 0 :]
        if last_name(call.func) not in ("all_reduce", "all_gather", "all_gather_object") or not given:
            continue
        if not isinstance(into, ast.Name) or definition(program, call.func) or is_a_wait(call):
            continue
        below = [each for each in known if each.node.lineno > call.lineno]
        loads = [
            each
            for each in own_nodes(program, call)
            if isinstance(each, ast.Name) and each.id == into.id and isinstance(each.ctx, ast.Load)
        ]
        made = [each.node for each in bindings(program, into, into.id) if each.kind == "value"]
        here = any(_same_pass(source, each, call) for each in made)
        if below and here and call.lineno > loop.lineno and not any(each.lineno > call.lineno for each in loads):
            found.append(call)
    return found


def _same_pass(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether two places stand in the same pass of the same loops: what is bound at one is gone in the next pass."""
    around = [[each for each in above(source, node) if isinstance(each, Loop)] for node in (one, other)]
    return around[0] == around[1]


def is_a_wait(call: ast.Call) -> bool:
    """Whether a collective over nothing stands for a barrier."""
    first = call.args[0] if call.args else None
    return (
        isinstance(first, ast.Call)
        and last_name(first.func) in ("zeros", "ones", "tensor", "empty")
        and not any(isinstance(each, ast.Name) and each.id not in ("torch", "device") for each in walk(first))
    )
