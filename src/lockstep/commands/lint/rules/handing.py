"""Files that one rank writes and all of them read: whether the others wait for it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from lockstep.commands.lint.around import above, class_of, function_of
from lockstep.commands.lint.calls import instance_of
from lockstep.commands.lint.flow import own_nodes
from lockstep.commands.lint.guards import guarded
from lockstep.commands.lint.instances import resolve
from lockstep.commands.lint.places import inside
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.ranks import side
from lockstep.commands.lint.roles import constant, given
from lockstep.commands.lint.rule import Hit, rule
from lockstep.commands.lint.rules.spelling import spelling
from lockstep.commands.lint.several import distributed, wrapped
from lockstep.commands.lint.sites import Site, sites
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.standins import runs
from lockstep.commands.lint.tree import walk
from lockstep.commands.lint.ways import Made, entered

_WRITES = {  # -> the place of the path, or of the open file, and its name
    "torch.save": (1, "f"),
    "numpy.save": (0, "file"),
    "numpy.savez": (0, "file"),
    "numpy.savez_compressed": (0, "file"),
    "joblib.dump": (1, "filename"),
    "safetensors.torch.save_file": (1, "filename"),
    "shutil.copy": (1, "dst"),
    "shutil.copyfile": (1, "dst"),
    "shutil.copy2": (1, "dst"),
    "shutil.move": (1, "dst"),
    "os.replace": (1, "dst"),
    "os.rename": (1, "dst"),
}
_READS = {
    "torch.load": (0, "f"),
    "torch.jit.load": (0, "f"),
    "numpy.load": (0, "file"),
    "joblib.load": (0, "filename"),
    "safetensors.torch.load_file": (0, "filename"),
    "pandas.read_csv": (0, "filepath_or_buffer"),
    "pandas.read_parquet": (0, "path"),
}
_WAITING = re.compile(
    r"barrier|reduce|broadcast|wait|gather|sync|sleep|scatter|process_group|prepare|^setup|^spawn$|start_processes|lock"
    r"|^backward$|^recv"
)
_DEPTH = 6  # callers followed


@rule(
    "LS406",
    "no-barrier-before-load",
    "nothing lets the ranks wait between saving and loading",
    result="ranks read a file that rank 0 has not finished, or not begun: an error, or the weights of an earlier run",
    why="rank 0 writes while the others go on to the line that reads",
    mend="if rank == 0:\n    torch.save(state, path)\ndist.barrier()\nstate = torch.load(path)",
)
def no_barrier_before_load(program: Program) -> Iterator[Hit]:
    """A file that one rank writes and all read, both in one function or in what it calls, with no wait between."""
    if not distributed(program):
        return
    written = [each for each in [*_named(program, _WRITES), *_opened(program, True)] if guarded(program, each[0])]
    known = [*_named(program, _READS), *_opened(program, False)] if written else []
    read = [each for each in known if not guarded(program, each[0]) or _of_others(program, each[0])]
    writers = [way for each in written for way in _ways(program, *each)]
    readers = [way for each in read for way in _ways(program, *each)]
    told = set[ast.AST]()
    for later in readers:
        for earlier in writers:
            if later.node not in told and _follows(program, earlier, later) and not _waited(program, earlier, later):
                told.add(later.node)
                yield Hit(later.node)


@dataclass(frozen=True, eq=False)
class _Way:
    """A place that leads to a write or a read of a path, by calls: `inner` are the places in the functions called.

    `path` stands at the write or the read; `sites` are the calls that lead there, which say what its parameters hold.
    """

    node: ast.Call
    path: ast.expr
    inner: tuple[ast.Call, ...] = ()
    sites: tuple[Site, ...] = ()


def _named(program: Program, table: dict[str, tuple[int, str]]) -> Iterator[tuple[ast.Call, ast.expr]]:
    for full, (place, name) in table.items():
        for call, seen in runs(program, full).items():
            path = given(program, seen, name, place)
            if path is not None:
                yield call, path


def _opened(program: Program, to_write: bool) -> Iterator[tuple[ast.Call, ast.expr]]:
    """The calls of open(path), and path.write_text() and its like."""
    for call in program.named.get("open", []):
        whole = isinstance(call.func, ast.Name)
        path = call.args[0] if whole and call.args else None
        mode = constant(program, given(program, call, "mode", 1)) if whole else ...
        mode = "r" if whole and given(program, call, "mode", 1) is None else mode
        if path is not None and isinstance(mode, str) and mode[:1] in ("wx" if to_write else "r"):
            yield call, path
    for name in ("write_text", "write_bytes") if to_write else ("read_text", "read_bytes"):
        for call in program.named.get(name, []):
            if isinstance(call.func, ast.Attribute) and not qualified(program, call.func):
                yield call, call.func.value
    for call in [*program.named.get("to_csv", []), *program.named.get("to_parquet", [])] if to_write else []:
        yield from ((call, path) for path in call.args[:1])


def _of_others(program: Program, call: ast.Call) -> bool:
    """Whether all ranks but the one that writes come here."""
    source, inner = program.owner[call], cast(ast.AST, call)
    for outer in above(source, call):
        if isinstance(outer, ast.If) and (which := side(program, outer.test)):
            return (which < 0 and inner in outer.body) or (which > 0 and inner in outer.orelse)
        inner = outer
    return False


def _ways(program: Program, call: ast.Call, path: ast.expr) -> list[_Way]:
    """The place itself, and those of the calls that lead to it."""
    found, waiting = list[_Way](), [_Way(call, path)]
    while waiting and len(found) < 24:
        way = waiting.pop(0)
        found.append(way)
        function = function_of(program.owner[way.node], way.node)
        if function is None or len(way.inner) > _DEPTH:
            continue
        for site in [*sites(program, function), *_of_object(program, function)]:
            if not site.spawned:
                waiting.append(_Way(site.call, way.path, (way.node, *way.inner), (site, *way.sites)))
    return found


def _of_object(program: Program, function: Function) -> list[Site]:
    """Where an object is called whose class has the function as its __call__."""
    if function.name != "__call__":
        return []
    owner = class_of(program.owner[function], function)
    return [
        Site(call, function, list(call.args), 1)
        for call in program.calls
        if isinstance(call.func, ast.Name | ast.Attribute)
        and not qualified(program, call.func)
        and instance_of(program, call.func) is owner
    ]


def _follows(program: Program, one: _Way, other: _Way) -> bool:
    """Whether two places stand in one function, one after the other, and are about one file."""
    source, first, last = program.owner[one.node], one.node, other.node
    if program.owner[last] is not source or first is last or (first.end_lineno or 0) > last.lineno:
        return False
    if function_of(source, first) is not function_of(source, last) or last in set(walk(first)):
        return False
    if first.lineno == last.lineno and first.col_offset >= last.col_offset:
        return False
    around = set(above(source, last))
    for outer in above(source, first):
        apart = isinstance(outer, ast.If) and outer in around and _branch(outer, first) != _branch(outer, last)
        if apart and isinstance(outer, ast.If) and not side(program, outer.test):
            return False
    if any(isinstance(each, ast.Return) and each in set(above(source, first)) for each in around | {first}):
        return False
    return bool(_spelled(program, one) & _spelled(program, other))


def _branch(test: ast.If, node: ast.AST) -> str:
    return "body" if any(node in set(walk(each)) for each in test.body) else "else"


def _waited(program: Program, earlier: _Way, later: _Way) -> bool:
    """Whether a collective, or anything else that waits, runs after the write and before the read."""
    start, end = earlier.node.end_lineno or 0, later.node.lineno
    between = [each for each in own_nodes(program, later.node) if _within(each, start, end)]
    for each in earlier.inner:
        between += [one for one in own_nodes(program, each) if _within(one, each.end_lineno or 0, 10**9)]
    for each in later.inner:
        between += [one for one in own_nodes(program, each) if _within(one, 0, each.lineno)]
    skipped = {earlier.node, later.node, *earlier.inner, *later.inner}
    return any(_waits(program, each) for each in between if each not in skipped)


def _within(node: ast.AST, start: int, end: int) -> bool:
    return isinstance(node, ast.Call) and start <= node.lineno and (node.end_lineno or 0) <= end


def _waits(program: Program, call: ast.AST) -> bool:
    known = set(wrapped(program))
    return any(
        isinstance(each, ast.Call) and (each in known or bool(_WAITING.search(last_name(each.func))))
        for each in inside(program, call)
    )


@remembered
def _spelled(program: Program, way: _Way) -> frozenset[str]:
    """The ways in which a path is written, names replaced by what they hold, parameters by what the calls give."""
    held: dict[ast.AST, Made] = {}
    for site in way.sites:
        held = entered(site, Made(site.call, held))
    found = [spelling(program, made) for made in resolve(program, Made(way.path, held))[:6]]
    return frozenset(each for each in found if each)
