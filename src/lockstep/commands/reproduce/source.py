"""What of a script's own text some of its names need: definitions, imports and constants, and nothing that runs it."""

import ast
import builtins
from collections.abc import Mapping
from typing import Any

_LITERALS = (bool, int, float, str, bytes, type(None))


def excerpt(text: str, names: set[str], values: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The statements of a script that define these names and what they use in turn, in its order.

    `values`: what the script's global names hold when it runs. A name that is bound by anything but an import, a class
    or a function becomes the literal that it holds.

    Returns:
        the text, and names that could not be taken over: they hold no literal.
    """
    tree = ast.parse(text)
    places = _places(tree)
    needed, queue = set[str](), sorted(names)
    while queue:
        name = queue.pop()
        if name in needed or name not in places:
            continue
        needed.add(name)
        for node in places[name]:
            if _defines(node):
                queue += sorted(_used(node))
    lines, written, missing = list[str](), set[int](), list[str]()
    for node in tree.body:
        for name in sorted(needed):
            if node not in places[name] or id(node) in written:
                continue
            if _defines(node):
                written.add(id(node))
                if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                    lines.append(_text(text, node, needed))
            elif node is places[name][-1]:
                value = values.get(name)
                if _is_literal(value):
                    lines.append(f"{name} = {value!r}")
                else:
                    missing.append(name)
    return "\n\n".join(lines), missing


def _places(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Top-level names, and the top-level statements that bind them."""
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        for name in sorted(_bound(node)):
            found.setdefault(name, []).append(node)
    return found


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    found = set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id)
    return found


def _defines(node: ast.stmt) -> bool:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    return isinstance(node, kinds) or (isinstance(node, ast.Try) and all(map(_defines, node.body)))


def _text(text: str, node: ast.stmt, needed: set[str]) -> str:
    """A statement as it stands there, with its decorators; of an import the needed names alone."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        node.names = [each for each in node.names if (each.asname or each.name).partition(".")[0] in needed]
        return ast.unparse(node)
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def _used(node: ast.stmt) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names - set(dir(builtins))


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return type(value) in (list, tuple, set) and all(map(_is_literal, value))
    if isinstance(value, dict):
        return type(value) is dict and all(_is_literal(each) for pair in value.items() for each in pair)
    return isinstance(value, _LITERALS)
