"""Walks, texts and indexes that are worked out once say what ast itself says."""

import ast
from pathlib import Path

import pytest

from lockstep.commands.lint import check, tree
from lockstep.commands.lint.source import parse

SHAPES = [
    'f(a.b[0], *c, k="x", **d)[i, j].g(lambda: 1)(u"y")',
    "(-1).real, 1 .real, (a + b).c(x for x in y), a[1:2](await_=(1,)), (yield), f((yield))",
    "x = [*a, not b, f\"{c!r:>{d}}\", b'1', 1e400, ..., (y := 2)][()](*(), **{})",
    "@a.b(c)\ndef f(x: int = 1, *, y) -> None:\n    'text'\n    return x if y else {1: 2, **z}",
]


@pytest.mark.parametrize("text", [*SHAPES, Path(check.__file__).read_text(encoding="utf-8")])
def test_a_node_is_walked_and_written_as_ast_does(text: str) -> None:
    source = parse(Path("x.py"), text)
    for node in ast.walk(ast.parse(text)):
        tree.walk(node)  # also of what `parse` has not placed
    for node in source.nodes:
        said = [each for each in ast.walk(node) if not isinstance(each, ast.expr_context)]
        assert tree.walk(node) == said
        assert tree.walk(node) is tree.walk(node)
        assert tree.children(node) == [each for each in ast.iter_child_nodes(node) if each in said]
        if isinstance(node, ast.expr | ast.stmt):
            assert tree.text_of(node) == ast.unparse(node)


def test_nodes_by_type_keep_their_order() -> None:
    source = parse(Path("x.py"), Path(check.__file__).read_text(encoding="utf-8"))
    assert source.of(ast.Name, ast.Call) == [each for each in source.nodes if isinstance(each, ast.Name | ast.Call)]
    assert source.functions == [each for each in source.nodes if isinstance(each, ast.FunctionDef)]
    assert source.loops == [each for each in source.nodes if isinstance(each, ast.For)]
    assert len(source.loops) > 1
