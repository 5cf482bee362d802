"""Sums that an Ignite engine's step keeps in `engine.state`, and the handlers that read them there."""

import ast
from collections.abc import Iterator

from lockstep.commands.lint.around import function_of
from lockstep.commands.lint.flow import is_telling, mentions, reduces, root_name, tainted
from lockstep.commands.lint.origins import origins
from lockstep.commands.lint.program import Program, last_name, remembered
from lockstep.commands.lint.roles import sharding
from lockstep.commands.lint.rules.by_ignite import engine_step
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Function
from lockstep.commands.lint.told import is_result
from lockstep.commands.lint.tree import walk


@remembered
def told_from_state(program: Program, training: bool) -> list[ast.Call]:
    """The calls that tell what an engine's step adds up over its rank's part, in its state, and nothing reduces."""
    found = list[ast.Call]()
    for engine in program.named.get("Engine", []) if library(program, "ignite") else []:
        step = engine_step(program, engine)
        trains = step is not None and any(last_name(each.func) == "backward" for each in _calls(step))
        if step is None or trains is not training or not _over_parts(program, engine):
            continue
        for name in sorted(_added(step)):
            readers = list(_readers(program, step, name))
            if not any(reduces(program, each) and _holds(each, name, names) for each, names in readers):
                found += [each for each, names in readers if is_telling(each) and _holds(each, name, names)][:1]
    return list(dict.fromkeys(found))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    yield from (each for each in walk(node) if isinstance(each, ast.Call))


def _over_parts(program: Program, engine: ast.Call) -> bool:
    """Whether an engine runs over a loader of which each rank has its part."""
    for run in program.named.get("run", []):
        if run.args and isinstance(run.func, ast.Attribute) and engine in origins(program, run.func.value):
            for made in origins(program, run.args[0]):
                if isinstance(made, ast.Call) and (
                    last_name(made.func) == "auto_dataloader" or sharding(program, made)
                ):
                    return True
    return False


def _added(step: Function) -> set[str]:
    """The names in the state that a step adds losses or hits to: `engine.state.total += loss.item()`."""
    found = set[str]()
    for node in walk(step):
        match node:
            case ast.AugAssign(op=ast.Add(), target=ast.Attribute(value=ast.Attribute(attr="state"), attr=name)):
                parts = list(walk(node.value))
                if any(map(is_result, parts)) or any(isinstance(p, ast.Name) and "loss" in p.id for p in parts):
                    found.add(name)
    return found


def _readers(program: Program, step: Function, name: str) -> Iterator[tuple[ast.Call, set[str]]]:
    """The calls in the functions that read this name of a state, and the names that are computed from it there."""
    places = (each for source in program.sources for each in source.of(ast.Attribute) if each.attr == name)
    functions = {function_of(program.owner[each], each) for each in places if _is_read(each)} - {step, None}
    for function in functions:
        nodes = list(walk(function)) if function is not None else []
        made = [each for each in nodes if isinstance(each, ast.Assign) and _holds(each.value, name, set())]
        parts = [part for each in made for target in each.targets for part in walk(target)]
        names = {root_name(each) for each in parts if isinstance(each, ast.Name)}
        names = tainted(nodes, names) if names else names
        yield from ((each, names) for each in nodes if isinstance(each, ast.Call))


def _is_read(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Attribute) and node.value.attr == "state"


def _holds(node: ast.AST, name: str, names: set[str]) -> bool:
    own = any(isinstance(each, ast.Attribute) and each.attr == name and _is_read(each) for each in walk(node))
    return own or (bool(names) and mentions(node, names))
