"""Which of a name's or an attribute's bindings may hold at a place."""

import ast

from lockstep.commands.lint.around import above, function_of
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.source import Binding, Source
from lockstep.commands.lint.tree import text_of


def reaching(program: Program, name: ast.AST, found: list[Binding]) -> list[Binding]:
    """Of a name's bindings those that may hold at a place: the nearest before it, and what a branch may leave."""
    if len(found) < 2:
        return found
    source = program.owner[name]
    if source.scopes[name] is not source.scopes.get(found[0].node, source.scopes[name]):
        return found
    outer = [name, *above(source, name)]
    place, kept = _start(name), []
    for binding in reversed(found):
        if binding.kind == "param":
            kept.append(binding)
            break
        if _start(binding.node) > place or binding.node in outer[:1]:
            continue
        blocks = [each for each in above(source, binding.node) if isinstance(each, ast.stmt)]
        inside = binding.node in outer
        if isinstance(binding.node, ast.stmt) and inside and not isinstance(binding.node, ast.For | ast.AsyncFor):
            continue  # the statement's own right side
        if any(_apart(block, binding.node, name, source.parents) for block in blocks if block in outer):
            continue
        kept.append(binding)
        if inside or all(block in outer for block in blocks):
            break
    return kept or found


def _start(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def _apart(block: ast.AST, one: ast.AST, other: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether two places stand in different branches of an `if`."""
    if not isinstance(block, ast.If):
        return False

    def branch(node: ast.AST) -> str:
        while parents[node] is not block:
            node = parents[node]
        return "else" if node in block.orelse else "test" if node is block.test else "body"

    return {branch(one), branch(other)} == {"body", "else"}


def holding(program: Program, found: list[Binding], node: ast.AST) -> list[Binding]:
    """Of an attribute's bindings in one function those that hold at its end, or above a place of the same function."""
    source = program.owner[found[0].node]
    functions = {function_of(source, each.node) if each.node in source.scopes else None for each in found}
    if len(functions) != 1 or None in functions:
        return found
    here = node in source.scopes and function_of(source, node) in functions
    kept: list[Binding] = []
    for each in reversed(found):
        if here and getattr(each.node, "lineno", 0) >= getattr(node, "lineno", 0):
            continue
        kept.append(each)
        if source.parents[each.node] in functions:
            break
    return kept or found


def last_above(source: Source | None, node: ast.Subscript) -> list[Binding]:
    """What `nets[k]` was set to last above a place of the same function, by the same words; nothing, or one."""
    found = source.attributes.get(text_of(node), []) if source is not None and node in source.scopes else []
    known = [
        each
        for each in found
        if source is not None
        and function_of(source, each.node) is function_of(source, node)
        and (getattr(each.node, "end_lineno", 0) or 0) < node.lineno
        and not exclude(source, each.node, node)
    ]
    return [each for each in known[-1:] if each.kind == "value"]


def exclude(source: Source, one: ast.AST, other: ast.AST) -> bool:
    """Whether two places stand in different branches of an `if`, so that one pass comes by one of them."""
    outer = set(above(source, other))
    return any(_apart(block, one, other, source.parents) for block in above(source, one) if block in outer)
