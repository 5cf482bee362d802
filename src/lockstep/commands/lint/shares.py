"""A rank's own sums followed statement by statement: which names hold them still, and which the ranks' sum."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.commands.lint.around import above
from lockstep.commands.lint.calls import callee, definition
from lockstep.commands.lint.flow import mentions, reduces, root_name
from lockstep.commands.lint.program import Program, last_name
from lockstep.commands.lint.source import Function, Loop
from lockstep.commands.lint.tree import children, text_of, walk

_IN_PLACE = ("all_reduce", "reduce", "broadcast")
_INTO_FIRST = ("all_gather", "all_gather_object", "all_gather_into_tensor", "all_gather_single")
_SIZES = ("len", "range", "isinstance", "type", "id")


@dataclass(frozen=True, eq=False)
class Reading:
    """A statement (of a compound one its head), the names that hold this rank's own numbers there, and whether some
    of the loop's sums have been reduced above it."""

    node: ast.stmt
    own: frozenset[str]


@dataclass
class State:
    """The names that hold own numbers, those that share an object, whether a sum has been reduced, what was read."""

    own: set[str]
    alias: dict[str, set[str]] = field(default_factory=dict)
    reduced: bool = False
    read: list[Reading] = field(default_factory=list)

    def copy(self) -> "State":
        """The state at the beginning of a branch."""
        return State(set(self.own), {name: set(others) for name, others in self.alias.items()}, self.reduced, [])


def follow(program: Program, node: ast.stmt, state: State) -> None:
    """Go through what comes after a statement, to the end of its function or of the pass of a loop around it."""
    source = program.owner[node]
    inner: ast.AST = node
    for outer in above(source, node):
        if isinstance(inner, ast.stmt):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(outer, name, None)
                if isinstance(block, list) and inner in block:
                    gone_through(program, block[block.index(inner) + 1 :], state)
        if isinstance(outer, Function | ast.Lambda | Loop):
            break
        inner = outer


def reads(node: ast.AST, own: frozenset[str]) -> bool:
    """Whether a value is computed from one of these names, not from its length or type."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _SIZES:
        return False
    if isinstance(node, ast.Attribute) and node.attr in ("shape", "device", "dtype"):
        return False
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and text_of(node) in own:
        return True
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and root_name(node).startswith("self.")):
        return root_name(node) in own and isinstance(node.ctx, ast.Load)
    return any(reads(each, own) for each in children(node))


def gone_through(program: Program, block: list[ast.stmt], state: State) -> bool:
    """Go through statements; whether they end the function or the pass."""
    for node in block:
        match node:
            case ast.If(test=test, body=body, orelse=other):
                _read(program, state, node, test)
                _fork(program, body, other, state)
            case ast.For(iter=iterated, body=body) | ast.AsyncFor(iter=iterated, body=body):
                _read(program, state, node, iterated)
                if any(reduces(program, each) for part in body for each in walk(part)):
                    state.reduced = True
                    _clear(state, [iterated, *body])
                else:
                    gone_through(program, body, state)
            case ast.With(body=body) | ast.AsyncWith(body=body):
                if gone_through(program, body, state):
                    return True
            case ast.Try(body=body, finalbody=final):
                gone_through(program, body, state)
                gone_through(program, final, state)
            case ast.While() | ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                _clear(state, [node])
            case _:
                _read(program, state, node, node)
                _simple(program, node, state)
                if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
                    return True
    return False


def _read(program: Program, state: State, node: ast.stmt, part: ast.AST) -> None:
    if not state.reduced or any(reduces(program, each) for each in walk(part)):
        return
    if reads(part, frozenset(state.own)):
        state.read.append(Reading(node, frozenset(state.own)))


def _fork(program: Program, body: list[ast.stmt], other: list[ast.stmt], state: State) -> None:
    """Both ways of an `if`. Beside a way that reduces, the other is for one process: it isn't read."""
    ways = [state.copy(), state.copy()]
    ended = [gone_through(program, block, way) for block, way in zip((body, other), ways, strict=True)]
    reducing = [any(reduces(program, each) for part in block for each in walk(part)) for block in (body, other)]
    for number, way in enumerate(ways):
        if reducing[number] or not any(reducing):
            state.read.extend(way.read)
    lasting = [way for way, end in zip(ways, ended, strict=True) if not end] or ways
    if any(reducing):
        state.own = set.intersection(*(way.own for way in lasting))
    else:
        state.own = set.union(*(way.own for way in lasting))
    state.reduced = state.reduced or any(way.reduced for way in ways)
    for way in lasting:
        for name, others in way.alias.items():
            state.alias.setdefault(name, set()).update(others)


def _simple(program: Program, node: ast.stmt, state: State) -> None:
    calls = [each for each in walk(node) if isinstance(each, ast.Call) and reduces(program, each)]
    for call in calls:
        _reduce(program, call, state)
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
        targets = [node.target]
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) else None
    names = {root_name(part) for target in targets for part in _parts(target)} - {""}
    if value is None or not names:
        return
    if calls:
        _drop(state, names)
    elif reads(value, frozenset(state.own)):
        state.own |= names
        _link(state, names, value)
    elif isinstance(node, ast.Assign):
        state.own -= names


def _parts(target: ast.expr) -> list[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        return [part for each in target.elts for part in _parts(each)]
    return [target]


def _reduce(program: Program, call: ast.Call, state: State) -> None:
    """What a reduction leaves: the ranks' sum in the place of its argument, or, in doubt, of all that it is given."""
    name, local = last_name(call.func), definition(program, call.func) is not None or callee(program, call) is not None
    state.reduced = True
    if not local and name in _IN_PLACE and call.args and isinstance(call.args[0], ast.Name):
        _drop(state, {call.args[0].id})
    elif not local and name in _INTO_FIRST and len(call.args) > 1:
        _drop(state, {root_name(call.args[0])})
    else:
        _clear(state, [call])
        if not mentions(call, state.own) and local and not call.args:
            state.own.clear()  # it may reach for anything


def _clear(state: State, nodes: Sequence[ast.AST]) -> None:
    """Drop all that is named in these nodes."""
    named = {root_name(each) for node in nodes for each in walk(node) if isinstance(each, ast.Name | ast.Attribute)}
    if "self" in {each.id for node in nodes for each in walk(node) if isinstance(each, ast.Name)}:
        named |= {name for name in state.own if name.startswith("self.")}
    _drop(state, named)


def _drop(state: State, names: set[str]) -> None:
    for name in names:
        entries = {each for each in state.own if each.startswith(f"{name}[")}
        state.own -= {name, *state.alias.get(name, ()), *entries}


def _link(state: State, names: set[str], value: ast.expr) -> None:
    """`losses = meters["loss"]`: two names of one object, which a reduction changes for both."""
    if any(isinstance(each, ast.BinOp) for each in walk(value)):
        return
    calls = [last_name(each.func) for each in walk(value) if isinstance(each, ast.Call)]
    if all(name in ("values", "items", "list", "dict", "get", "detach", "view", "flatten") for name in calls):
        others = {root_name(each) for each in walk(value) if isinstance(each, ast.Name | ast.Attribute)} - {""}
        for name in names:
            state.alias.setdefault(name, set()).update(others)
        for name in others:
            state.alias.setdefault(name, set()).update(names)
