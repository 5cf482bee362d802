"""What a rule is: a small function over a program, with a code, and the words that a finding is told in."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.lint.program import Program


@dataclass(frozen=True)
class Edit:
    """A piece of a file's text and what takes its place: lines from 1, columns from 0 in UTF-8 bytes, as ast's."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: str


@dataclass(frozen=True)
class Hit:
    """A rule's find: the place, what it is there in words, and the edits that mend it where that is safe."""

    node: ast.AST
    detail: str = ""
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True)
class Rule:
    """`title` names the fault, `result` what becomes of the training by it, `why` the cause, `mend` what to write."""

    code: str
    name: str
    title: str
    result: str
    why: str
    mend: str
    find: Callable[[Program], Iterator[Hit]]


@dataclass(frozen=True, order=True)
class Finding:
    """A rule's find in a file."""

    path: Path
    line: int
    column: int
    code: str
    detail: str
    end_line: int
    end_column: int
    edits: tuple[Edit, ...] = ()


RULES: dict[str, Rule] = {}


def rule(
    code: str, name: str, title: str, *, result: str, why: str, mend: str
) -> Callable[[Callable[[Program], Iterator[Hit]]], Callable[[Program], Iterator[Hit]]]:
    """Enter a function in the list of rules."""

    def enter(find: Callable[[Program], Iterator[Hit]]) -> Callable[[Program], Iterator[Hit]]:
        assert code not in RULES, f"{code} is taken"
        RULES[code] = Rule(code, name, title, result, why, mend, find)
        return find

    return enter


def replace(node: ast.expr | ast.stmt, text: str) -> Edit:
    """The edit that puts a text in a node's place."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Edit(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text)


def insert(line: int, column: int, text: str) -> Edit:
    """The edit that adds a text at a place."""
    return Edit(line, column, line, column, text)
