"""The rule about how processes start: the main guard."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import above, function_of, statement_of
from lockstep.commands.lint.calls import definition
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.places import loaders_of
from lockstep.commands.lint.program import Program, last_name, qualified, remembered
from lockstep.commands.lint.roles import constant, given, of_loader
from lockstep.commands.lint.rule import Edit, Hit, insert, rule
from lockstep.commands.lint.several import library
from lockstep.commands.lint.sites import sites
from lockstep.commands.lint.source import Function, Source
from lockstep.commands.lint.tree import text_of


@rule(
    "LS314",
    "no-main-guard",
    "processes are spawned without a main guard",
    result="RuntimeError in each child: an attempt has been made to start a new process before bootstrapping has "
    "finished",
    why="a spawned process imports the file anew, and comes by the line that spawns",
    mend='if __name__ == "__main__":\n    mp.spawn(run, args=(world_size,), nprocs=world_size)',
)
def no_main_guard(program: Program) -> Iterator[Hit]:
    """mp.spawn that a file runs as it is imported."""
    told = set[ast.AST]()
    for node in _spawning(program):
        place = _runs_at_import(program, node, 0)
        if place is not None and place not in told:
            told.add(place)
            yield Hit(place, "", _guard_edit(program, place))


def _spawning(program: Program) -> Iterator[ast.AST]:
    """What starts processes that import the file anew: calls, and loops over a loader whose workers do."""
    anew = bool(methods(program) & {"spawn", "forkserver"})
    for call in program.calls:
        last, name = last_name(call.func), qualified(program, call.func)
        if (
            name.endswith(("multiprocessing.spawn", "multiprocessing.spawn.spawn", "ignite.distributed.spawn"))
            or (
                name.endswith("multiprocessing.start_processes")
                and constant(program, given(program, call, "start_method")) != "fork"
            )
            or (last in ("Process", "Pool") and anew)
            or (last == "ProcessPoolExecutor" and anew and given(program, call, "mp_context") is not None)
            or (last == "Parallel" and name.startswith("ignite.distributed") and _several(program, call))
            or (last in ("launch", "fit") and _by_lightning(program, call))
        ):
            yield call
    if not anew and not any("multiprocessing_context" in source.text for source in program.sources):
        return
    for source in program.sources:
        for node in source.of(ast.For):
            if any(_anew(program, each, anew) for each in loaders_of(program, node)):
                yield node


@remembered
def methods(program: Program) -> set[object]:
    """The ways in which the program says that processes are started: spawn, fork; Ellipsis where it can't be told."""
    return {
        constant(program, call.args[0] if call.args else None)
        for call in [*program.named.get("set_start_method", []), *program.named.get("get_context", [])]
    }


def _several(program: Program, call: ast.Call) -> bool:
    count = constant(program, given(program, call, "nproc_per_node"))
    return isinstance(count, int) and count > 1


def _by_lightning(program: Program, call: ast.Call) -> bool:
    """fabric.launch() and trainer.fit() where the strategy is ddp_spawn."""
    if not isinstance(call.func, ast.Attribute) or not library(program, "lightning", "pytorch_lightning"):
        return False
    made = [each for each in origins(program, call.func.value) if isinstance(each, ast.Call)]
    return any(
        last_name(each.func) in ("Fabric", "Trainer")
        and str(constant(program, given(program, each, "strategy"))).startswith("ddp_spawn")
        for each in made
    )


def _anew(program: Program, loader: ast.Call, anew: bool) -> bool:
    """Whether a loader has workers, and they are spawned."""
    workers = constant(program, of_loader(program, loader, "num_workers"))
    context = given(program, loader, "multiprocessing_context")
    spawned = anew if context is None else constant(program, context) in ("spawn", "forkserver")
    return isinstance(workers, int) and workers > 0 and spawned


def _runs_at_import(program: Program, node: ast.AST, depth: int) -> ast.AST | None:
    """The line of the file's top that leads here, under no main guard."""
    source = program.owner[node]
    if any(isinstance(each, ast.If) and "__name__" in text_of(each.test) for each in above(source, node)):
        return None
    function = function_of(source, node)
    if function is None:
        return statement_of(source, node) if source is program.root and not _left(source, node) else None
    for call in [*(site.call for site in sites(program, function)), *_handed(program, function)] if depth < 6 else []:
        found = _runs_at_import(program, call, depth + 1)
        if found is not None:
            return found
    return None


def _left(source: Source, node: ast.AST) -> bool:
    """`if __name__ != "__main__": raise SystemExit` above a line of the top."""
    return any(
        isinstance(each, ast.If) and each.lineno < getattr(node, "lineno", 0) and "__name__ !=" in text_of(each.test)
        for each in source.tree.body
    )


def _handed(program: Program, function: Function) -> Iterator[ast.Call]:
    """fire.Fire(function), and app() where the function is a command of app."""
    for call in [*program.named.get("Fire", []), *program.named.get("CLI", [])]:
        if any(definition(program, each) is function for each in call.args):
            yield call
    for mark in function.decorator_list:
        made = mark.func if isinstance(mark, ast.Call) else mark
        if isinstance(made, ast.Attribute) and made.attr == "command" and isinstance(made.value, ast.Name):
            yield from (each for each in program.named.get(made.value.id, []) if isinstance(each.func, ast.Name))


def _guard_edit(program: Program, node: ast.AST) -> tuple[Edit, ...]:
    """The guard above the file's last statement, where that is the one that spawns."""
    body = program.root.tree.body
    if isinstance(node, ast.Expr) and node is body[-1] and node.col_offset == 0 and node.end_lineno == node.lineno:
        return (insert(node.lineno, 0, 'if __name__ == "__main__":\n    '),)
    return ()
