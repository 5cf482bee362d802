"""Edits that need no decision: set_epoch told in the loop over epochs, shuffle dropped, the group's end."""

import ast
import re

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside, step_loops
from lockstep.commands.lint.program import Program, bindings, last_name
from lockstep.commands.lint.roles import SHARDING, constant, given
from lockstep.commands.lint.rule import Edit, insert
from lockstep.commands.lint.several import wrapped
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Loop, Source
from lockstep.commands.lint.tree import text_of, walk

_DRAWS = (*SHARDING, "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def telling(program: Program, sampler: ast.Call, loops: list[Loop]) -> tuple[Edit, ...]:
    """sampler.set_epoch(epoch) at the head of the one loop over epochs, where both have names in its scope."""
    around = list(dict.fromkeys(outer for loop in loops for outer in step_loops(program)[loop]))
    loop = around[0] if len(around) == 1 else None
    named = _named(program, sampler)
    if named is None or not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return ()
    counts = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) in ("range", "trange", "count")
    epoch, first, source = loop.target.id, loop.body[0], program.owner[loop]
    again = [each for each in walk(loop) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    if not counts or epoch == "_" or {named.id, epoch} & {each.id for each in again if each is not loop.target}:
        return ()
    if program.owner[named] is not source or not _holds(program, named, loop):
        return ()
    indent = _line(source, first.lineno)[: first.col_offset]
    if indent.strip() or first.lineno == loop.lineno or getattr(first, "decorator_list", []):
        return ()
    return (insert(first.lineno, len(indent.encode()), f"{named.id}.set_epoch({epoch})\n{indent}"),)


def _named(program: Program, made: ast.Call) -> ast.Name | None:
    """The only name that a call's result is bound to, and nothing else is."""
    parent = program.owner[made].parents[made]
    if not (isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name)):
        return None
    name = parent.targets[0]
    return name if len(bindings(program, name, name.id)) == 1 else None


def _holds(program: Program, name: ast.Name, loop: ast.For) -> bool:
    """Whether a name is bound above a loop, in the same scope, under no condition that the loop isn't under."""
    source = program.owner[loop]
    statement = statement_of(source, name)
    blocks = set(above(source, statement)) <= set(above(source, loop))
    return blocks and source.scopes[name] is source.scopes[loop] and statement.lineno < loop.lineno


def without_shuffle(program: Program, loader: ast.Call, sampler: ast.expr) -> tuple[Edit, ...]:
    """The call without shuffle=True, where its sampler is always one that draws by itself."""
    made = origins(program, sampler)
    draws = [each for each in made if isinstance(each, ast.Call) and last_name(each.func) in _DRAWS]
    orders = [each for each in draws if constant(program, given(program, each, "shuffle", 3)) is not False]
    parts: list[ast.expr | ast.keyword] = sorted([*loader.args, *loader.keywords], key=_start)
    word = next((each for each in loader.keywords if each.arg == "shuffle"), None)
    if not made or len(orders) != len(made) or any(definition(program, each.func) is not None for each in orders):
        return ()
    if word is None or not (isinstance(word.value, ast.Constant) and word.value.value is True):
        return ()
    place = parts.index(word)
    after = parts[place + 1] if place + 1 < len(parts) and parts[place + 1].lineno == word.end_lineno else None
    if after is not None:
        start, end, comma = _start(word), _start(after), (_end(word), _start(after))
    elif place:
        start, end, comma = _end(parts[place - 1]), _end(word), (_end(parts[place - 1]), _start(word))
    else:
        return ()
    if not re.fullmatch(r"\s*,\s*", _between(program.owner[loader], *comma)):
        return ()  # a comment, or parentheses
    return (Edit(*start, *end, ""),)


def _start(node: ast.expr | ast.keyword) -> tuple[int, int]:
    return (node.lineno, node.col_offset)


def _end(node: ast.expr | ast.keyword) -> tuple[int, int]:
    return (node.end_lineno or 0, node.end_col_offset or 0)


def _between(source: Source, start: tuple[int, int], end: tuple[int, int]) -> str:
    """The text from one place to another; lines from 1, columns in bytes."""
    lines = [_line(source, number).encode() for number in range(start[0], end[0] + 1)]
    lines[-1] = lines[-1][: end[1]]
    lines[0] = lines[0][start[1] :]
    return b"\n".join(lines).decode()


def ending(program: Program, begun: ast.Call) -> tuple[Edit, ...]:
    """dist.destroy_process_group() as the last line of the function that begins the group and trains."""
    if not isinstance(begun.func, ast.Attribute) or not isinstance(begun.func.value, ast.Name):
        return ()
    if begun.func.attr != "init_process_group":
        return ()
    source, place = program.owner[begun], begun
    for _ in range(3):
        body = _body(program, place)
        function = function_of(source, place)
        if body is None:
            return ()
        if function is None or _trains(program, function):
            break
        known = sites(program, function)
        if len(known) != 1 or known[0].spawned or program.owner[known[0].call] is not source:
            return ()
        place = known[0].call
    else:
        return ()
    last, alias = body[-1], begun.func.value
    if not _goes_through(program, body, function) or bindings(program, last, alias.id) != bindings(
        program, alias, alias.id
    ):
        return ()
    head = _line(source, last.lineno)[: body[0].col_offset]
    if head.strip() or not all(_line(source, each.lineno)[: each.col_offset] == head for each in body[-1:]):
        return ()
    line = last.end_lineno or last.lineno
    return (insert(line, len(_line(source, line).encode()), f"\n{head}{text_of(alias)}.destroy_process_group()"),)


def _body(program: Program, place: ast.Call) -> list[ast.stmt] | None:
    """The statements beside the one that a call is: of a function, of the file, or below the main guard."""
    source = program.owner[place]
    statement = statement_of(source, place)
    if not isinstance(statement, ast.Expr | ast.Assign) or statement.value is not place:
        return None
    outer = source.parents[statement]
    guard = isinstance(outer, ast.If) and "__name__" in text_of(outer.test) and statement in outer.body
    if guard or isinstance(outer, Function | ast.Module):
        found: list[ast.stmt] = getattr(outer, "body", [])
        return found
    return None


def _trains(program: Program, function: Function) -> bool:
    """Whether a function, or what it calls, wraps the model or trains it."""
    wanted = {*wrapped(program), *backwards(program)}
    return any(each in wanted for each in inside(program, function))


def _goes_through(program: Program, body: list[ast.stmt], function: Function | None) -> bool:
    """Whether the last statement of a body is always come by, and goes on to what would stand after it."""
    source, last = program.owner[body[0]], body[-1]
    own = [each for each in walk(function) if function_of(source, each) is function] if function is not None else []
    if any(isinstance(each, ast.Return | ast.Yield | ast.YieldFrom) for each in own):
        return False
    forever = isinstance(last, ast.While) and isinstance(last.test, ast.Constant)
    guard = isinstance(last, ast.If) and "__name__" in text_of(last.test)
    ends = forever or guard or isinstance(last, ast.Raise | ast.FunctionDef | ast.ClassDef)
    calls = [each for each in walk(last) if isinstance(each, ast.Call)]
    return not ends and not any(last_name(each.func) in ("exit", "_exit", "quit") for each in calls)


def _line(source: Source, number: int) -> str:
    lines = source.text.split("\n")
    return lines[number - 1] if number <= len(lines) else ""
