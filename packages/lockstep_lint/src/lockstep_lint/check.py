"""From paths to findings: which files, which programs among them, what the rules say of each."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep_lint.facts.modules import MARKS, Module, Project
from lockstep_lint.facts.training import BACKWARD, Facts
from lockstep_lint.rules import Rule

CONCERNS = re.compile(
    r"backward|init_process_group|DistributedDataParallel|horovod|Accelerator\(|Fabric\(|DataLoader\("
)
SKIPPED = frozenset(["__pycache__", "node_modules", "site-packages", "build", "dist", "venv", "env"])
TESTS = re.compile(r"^(test_.*|.*_test|conftest)\.py$")
NOQA = re.compile(r"#\s*noqa\b(?::\s*(?P<codes>[A-Z]+[0-9]*(?:[\s,]+[A-Z]+[0-9]+)*))?", re.I)


@dataclass(frozen=True, order=True)
class Finding:
    """A place and the rule that it breaks."""

    path: str
    line: int
    column: int  # from 1
    end_line: int
    code: str
    detail: str = ""


@dataclass
class Report:
    """What was found, and what was not read."""

    findings: list[Finding]
    unread: dict[str, str]  # path -> why
    files: int


def python_files(paths: Iterable[Path]) -> Iterator[Path]:
    """The Python files below paths. In folders, hidden ones, installed packages and tests are left out."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith(".") and name not in SKIPPED and name not in ("test", "tests")
            )
            for name in sorted(names):
                if name.endswith(".py") and not TESTS.match(name):
                    yield Path(folder, name)


def check(paths: list[Path], rules: list[Rule]) -> Report:
    """Reads the files and applies the rules to each program among them."""
    files = list(dict.fromkeys(python_files(paths)))
    project = Project([_bound(Path(os.path.abspath(path))) for path in paths])
    modules: list[Module] = []
    for path in files:
        if module := project.load(path, str(path)):
            modules.append(module)
    linted = set(modules)
    found: set[Finding] = set()
    imported = {each for module in modules for each in project.imported(module) if each is not module}
    roots = [(module, False) for module in modules if module not in imported or "__main__" in module.text]
    libraries = [(module, True) for module in modules if "backward(" in module.text]
    trained: set[Module] = set()  # files whose backward passes some program reaches; others are read on their own
    for root, whole in (*roots, *libraries):
        if (whole and root in trained) or not any(CONCERNS.search(each.text) for each in project.closure(root)):
            continue
        try:
            facts = Facts(project, root, whole)
            trained |= {scope.module for _, scope in facts.calls(*BACKWARD)}
            found |= set(_of_program(facts, rules, linted))
        except RecursionError:
            project.notes[root.shown] = "it is nested too deeply"
    return Report(sorted(found), project.notes, len(files))


def _bound(path: Path) -> Path:
    """The folder above which no import is looked for."""
    if path.is_dir():
        return path
    for folder in path.parents:
        if any((folder / mark).exists() for mark in MARKS):
            return folder
    return path.parent


def _of_program(facts: Facts, rules: list[Rule], linted: set[Module]) -> Iterator[Finding]:
    for rule in rules:
        for node, scope, detail in rule.check(facts):
            if scope.module in linted and not silenced(scope.module, node, rule.code):
                line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
                end = _last_line(node)
                yield Finding(scope.module.shown, line, column, end, rule.code, detail)


def _last_line(node: ast.AST) -> int:
    """The last line that a finding is about: of a block only its head."""
    first: int = getattr(node, "lineno", 1)
    last: int | None = getattr(node, "end_lineno", None)
    body = getattr(node, "body", None)
    return max(first, body[0].lineno - 1) if isinstance(body, list) and body else last or first


def silenced(module: Module, node: ast.AST, code: str) -> bool:
    """Whether a comment on the first or last line of a place says noqa."""
    lines = module.lines
    for number in {getattr(node, "lineno", 1), _last_line(node)}:
        match = NOQA.search(lines[number - 1]) if 0 < number <= len(lines) else None
        if match is None:
            continue
        codes = match["codes"]
        if not codes or any(code.startswith(each.upper()) for each in re.split(r"[\s,]+", codes)):
            return True
    return False
