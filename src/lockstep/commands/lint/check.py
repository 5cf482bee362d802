"""From files and folders to findings."""

import ast
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lockstep.commands.lint.rules as _rules
from lockstep.commands.lint.program import Program, load
from lockstep.commands.lint.rule import RULES, Finding, Hit, Rule
from lockstep.commands.lint.several import library
from lockstep.commands.lint.source import Source, silenced
from lockstep.commands.lint.tree import text_of

_ELSEWHERE = {
    ".git",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    "build",
    "dist",
    ".tox",
    ".mypy_cache",
    "site-packages",
}
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "accelerate", "ignite", "timm", "torchvision", "horovod.torch")
_MANY = 200  # files, of which about 100 MB are kept until the process ends
assert _rules  # importing them has entered them


def files(paths: Iterable[Path]) -> list[Path]:
    """The Python files of these paths, each once; folders that hold none of one's own are left out."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inner = (each for each in sorted(path.rglob("*.py")) if not _ELSEWHERE & set(each.relative_to(path).parts))
            found.extend(inner)
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def check(paths: list[Path], codes: frozenset[str]) -> tuple[list[Finding], list[Path]]:
    """The findings in these files, sorted, and the files that are no Python.

    A file that another one of them imports is checked with that one: alone it shows a part of the program.
    """
    with _uncollected(len(paths)):
        return _check(paths, codes)


@contextmanager
def _uncollected(files: int) -> Iterator[None]:
    """Without the garbage collector, which would go through all trees again and again: they are held to the end.

    It would also go through them once more afterwards, for a second where they are many: those are left to the exit.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            if files > _MANY:
                gc.freeze()
            gc.enable()


def _check(paths: list[Path], codes: frozenset[str]) -> tuple[list[Finding], list[Path]]:
    parsed: dict[Path, Source | None] = {}
    programs = {path: program for path in paths if (program := load(path, parsed))}
    broken = [path for path in paths if path not in programs]
    imported = {
        source.path for program in programs.values() for source in program.sources if source is not program.root
    }
    names = {path.resolve(): path for path in paths}
    found = set[Finding]()
    for path, program in programs.items():
        if (path.resolve() not in imported or _starts(program.root)) and library(program, *_LIBRARIES):
            found.update(_findings(program, names, codes))
    return sorted(_fullest(found)), broken


def _fullest(found: set[Finding]) -> Iterator[Finding]:
    """Without those that say nothing more than another at their place: two ways may lead to one fault."""
    said = {(each.path, each.line, each.column, each.code) for each in found if each.detail}
    return (each for each in found if each.detail or (each.path, each.line, each.column, each.code) not in said)


def _starts(source: Source) -> bool:
    """Whether a file is a program, by its main guard."""
    return any(
        isinstance(node, ast.If) and "__name__" in text_of(node.test) and "__main__" in text_of(node.test)
        for node in source.tree.body
    )


def _findings(program: Program, names: dict[Path, Path], codes: frozenset[str]) -> Iterator[Finding]:
    for code, rule in RULES.items():
        if code in codes:
            for hit in rule.find(program):
                finding = _finding(program, rule, hit, names)
                if finding is not None:
                    yield finding


def _finding(program: Program, rule: Rule, hit: Hit, names: dict[Path, Path]) -> Finding | None:
    source, node = program.owner[hit.node], hit.node
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    if source.path not in names or silenced(source, line, rule.code):
        return None
    end = getattr(node, "end_lineno", line), getattr(node, "end_col_offset", column)
    return Finding(names[source.path], line, column + 1, rule.code, hit.detail, *end, hit.edits)
