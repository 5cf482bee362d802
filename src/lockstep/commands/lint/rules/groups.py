"""Accumulation in an inner loop: backward for each of a group of batches, and one step after them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.calls import callee, definition, method
from lockstep.commands.lint.flow import mentions, own_nodes
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import backwards, inside, loops, model_calls, over_loader
from lockstep.commands.lint.program import Program, bindings, last_name, remembered
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Loop
from lockstep.commands.lint.tree import text_of, walk


@dataclass(frozen=True, eq=False)
class Group:
    """`loop` runs over the batches of one update, which comes after it."""

    loop: ast.For
    backward: ast.Call


@remembered
def groups(program: Program) -> list[Group]:
    """The loops whose passes each run forward and backward over a batch of their own, and that a step follows."""
    return list(_groups(program))


def _groups(program: Program) -> Iterator[Group]:
    for call in backwards(program):
        seen = set[Loop]()
        for path in loops(program, call):
            inner = path[0] if len(path) > 1 else None
            if not isinstance(inner, ast.For) or inner in seen or not _over_batches(program, inner):
                continue
            seen.add(inner)
            within = set(inside(program, inner))
            steps = [each for each in own_nodes(program, inner) if is_update(each) and each not in within]
            outer = path[1]
            around = [
                each for each in steps if _line(each) > (inner.end_lineno or 0) and _line(each) <= _last(outer, inner)
            ]
            if around and not any(is_update(each) for each in within):
                yield Group(inner, call)
                break


def _last(outer: Loop, inner: ast.For) -> int:
    """The last line of an outer loop of the same function; past all lines, where that loop is in a caller."""
    same = outer.lineno < inner.lineno and (outer.end_lineno or 0) >= (inner.end_lineno or 0)
    return outer.end_lineno or 0 if same else 10**9


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def is_update(node: ast.AST) -> bool:
    """optimizer.step() or scaler.step(optimizer), by its name."""
    if not (isinstance(node, ast.Call) and last_name(node.func) == "step" and isinstance(node.func, ast.Attribute)):
        return False
    return bool(re.search(r"opt|scaler", text_of(node.func.value).lower()))


def _over_batches(program: Program, loop: ast.For) -> bool:
    """Whether each pass has a batch of its own: the next of an iterator, or one of a list of batches."""
    draws = any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "next" for each in walk(loop)
    )
    counts = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) in ("range", "trange")
    if counts:
        return draws
    models = {text_of(each.func) for each in model_calls(program, loop)}
    targets = {each.id for each in walk(loop.target) if isinstance(each, ast.Name)}
    batches = isinstance(loop.target, ast.Tuple) or bool(re.search("batch|micro|sample", text_of(loop.target)))
    return (
        bool(models)
        and not models & targets
        and batches
        and (not over_loader(program, loop) or _of_group(program, loop.iter))
    )


def _of_group(program: Program, node: ast.expr) -> bool:
    """list(islice(batches, k)): a few batches of a loader."""
    while isinstance(node, ast.Call) and last_name(node.func) == "enumerate" and node.args:
        node = node.args[0]
    parts = [each for made in [node, *origins(program, node)] for each in walk(made)]
    return any(isinstance(each, ast.Call) and last_name(each.func) == "islice" for each in parts)


def whole_windows(program: Program) -> Iterator[ast.AST]:
    """`for _ in range(len(loader) // k)` that takes k batches in each pass: the last, shorter group never comes.

    And generators of groups that yield the full ones alone.
    """
    for call in backwards(program):
        for loop in {loop for path in loops(program, call) for loop in path}:
            yield from _held_back(program, loop.iter) if isinstance(loop, ast.For) else ()
        for part in _comprehensions(program, call):
            yield from _held_back(program, part.iter)
    for source in program.sources:
        for node in source.of(ast.For):
            if _zipped(program, node):
                yield node
            match node:
                case ast.For(iter=ast.Call(func=ast.Name(id="range" | "trange"), args=[last])):
                    made = [last, *origins(program, last)]
                    counts = [
                        each for each in made if isinstance(each, ast.BinOp) and isinstance(each.op, ast.FloorDiv)
                    ]
                    for count in counts[:1]:
                        length = isinstance(count.left, ast.Call) and text_of(count.left.func) == "len"
                        if length and "loader" in text_of(count.left).lower() and _takes(node, count.right):
                            yield node
                case ast.For() if _gathers(program, node):
                    yield node


def _gathers(program: Program, loop: ast.For) -> bool:
    """`group.append(batch)` and an update once there are k: the last ones are in a list that nothing reads any more."""
    source = program.owner[loop]
    for each in walk(loop):
        match each:
            case ast.If(test=ast.Compare(left=ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=held)]))) if (
                source.parents[each] is loop
            ):
                kept = [one for one in program.named.get("append", []) if text_of(one.func) == f"{held}.append"]
                taken = any(
                    mentions(one.args[0], _names(loop.target)) for one in kept if one.args and one in walk(loop)
                )
                emptied = [b for b in bindings(program, each, held) if source.parents[b.node] is source.parents[loop]]
                last = loop.end_lineno or 0
                later = [
                    n for n in own_nodes(program, loop) if isinstance(n, ast.Name) and n.id == held and n.lineno > last
                ]
                trains = any(call in set(inside(program, loop)) for call in backwards(program))
                if taken and emptied and trains and not later and over_loader(program, loop):
                    return True
    return False


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in walk(node) if isinstance(each, ast.Name)}


def _comprehensions(program: Program, call: ast.Call) -> Iterator[ast.comprehension]:
    """`for group in groups(loader)` of `[update(group) for group in groups(loader)]`, where update runs a call."""
    function = function_of(program.owner[call], call)
    for site in sites(program, function) if function is not None else []:
        for outer in above(program.owner[site.call], site.call):
            if isinstance(outer, ast.stmt):
                break
            yield from getattr(outer, "generators", [])


def _held_back(program: Program, iterated: ast.expr) -> Iterator[ast.If]:
    """The condition under which a local generator yields what it has gathered, where it yields nothing after that."""
    for call in dict.fromkeys([*walk(iterated), *origins(program, iterated)]):
        maker = callee(program, call) if isinstance(call, ast.Call) else None
        owner = definition(program, call.func) if isinstance(call, ast.Call) else None
        if isinstance(owner, ast.ClassDef):
            maker = method(program, owner, "__iter__")
        yields = [each for each in walk(maker) if isinstance(each, ast.Yield)] if maker is not None else []
        if maker is None or len(yields) != 1 or not isinstance(yields[0].value, ast.Name):
            continue
        held = yields[0].value.id
        around = [each for each in above(program.owner[maker], yields[0]) if isinstance(each, ast.If | ast.For)]
        match around[:2]:
            case [
                ast.If(test=ast.Compare(left=ast.Call(func=ast.Name(id="len")), ops=[ast.Eq() | ast.GtE()])) as when,
                ast.For(),
            ]:
                if mentions(when.test, {held}) and not any(isinstance(each, ast.Or) for each in walk(when.test)):
                    yield when


def _zipped(program: Program, loop: ast.For) -> bool:
    """zip(*[iter(loader)] * k): groups of k, and none of what is left; over batches, for training."""
    match loop.iter:
        case ast.Call(func=ast.Name(id="zip"), args=[ast.Starred(value=value)]):
            rows = [value, *origins(program, value)]
            repeated = [each for each in rows if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Mult)]
            text = " ".join(text_of(each) for each in repeated)
            return "iter(" in text and any(call in set(inside(program, loop)) for call in backwards(program))
    return False


def _takes(loop: ast.For, size: ast.expr) -> bool:
    """islice(iterator, size), or next() in a loop over range(size)."""
    for each in walk(loop):
        match each:
            case ast.Call(func=function, args=[_, last]) if last_name(function) == "islice":
                if ast.dump(last) == ast.dump(size):
                    return True
            case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[last])) if each is not loop:
                if ast.dump(last) == ast.dump(size) and "next(" in text_of(each):
                    return True
    return False


def over_parts(loop: ast.For) -> bool:
    """Whether a loop runs over the parts of a batch: x.chunk(4), or range(0, len(x), 8) for x[i : i + 8]."""
    match loop:
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[_, _, _])):
            cuts = [each.lower for each in walk(loop) if isinstance(each, ast.Slice) and each.upper is not None]
            return any(isinstance(each, ast.Name) and each.id == name for each in cuts)
    return bool(re.search(r"\.(chunk|split|tensor_split)\(", text_of(loop.iter)))
