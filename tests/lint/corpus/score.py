"""What a linter makes of the corpus: found, missed, false alarms; of all scripts and of the third that is held out.

all_of_it = score(lint, {"LS101": "no-set-epoch", ...}, also)
the_third = score(lint, {"LS101": "no-set-epoch", ...}, also, held_out_only=True)
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.lint.corpus.held_out import Script, scripts

Lint = Callable[[Path], Iterable[tuple[str, Path, int]]]  # a file or folder -> (code, file, line) of each finding


@dataclass
class Score:
    """Counts over some scripts, and the cases to look at by name."""

    wrong: int = 0
    right: int = 0
    missed: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)  # the right name on another statement; not counted as found
    false_alarms: list[str] = field(default_factory=list)

    @property
    def found(self) -> int:
        return self.wrong - len(self.missed)


def statement(path: Path, line: int) -> tuple[int, int]:
    """First and last line of the innermost statement at a line; of a compound one its head alone."""
    spans = [(line, line)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None)
            spans.append((first, body[0].lineno - 1 if body else node.end_lineno or node.lineno))
    holding = [(first, last) for first, last in spans[1:] if first <= line <= last]
    return min(holding, key=lambda span: span[1] - span[0], default=spans[0])


def on_the_fault(script: Script, names: set[str], keyword: str, file: Path, line: int) -> bool:
    """Whether a finding names the script's fault, on a statement that holds one of its lines."""
    fault = script.fault
    if fault is None or keyword not in names:
        return False
    places = [(fault.file, fault.line), *fault.others]
    spans = [statement(file, number) for where, number in places if where.resolve() == file.resolve()]
    return any(first <= line <= last for first, last in spans)


def score(
    lint: Lint, keywords: Mapping[str, str], also: Mapping[str, Iterable[str]], held_out_only: bool = False
) -> Score:
    """Run a linter over the corpus. `keywords`: code -> keyword; `also`: keyword -> others that are as good.

    A code without a keyword is its own: it can only be a false alarm.
    """
    result = Score()
    for script in [*scripts("right"), *scripts("wrong")]:
        if held_out_only and not script.held_out:
            continue
        names = {script.fault.keyword, *also.get(script.fault.keyword, ())} if script.fault else set()
        hit = False
        for code, file, line in lint(script.path):
            if on_the_fault(script, names, keywords.get(code, code), file, line):
                hit = True
                continue
            where = result.misplaced if keywords.get(code, code) in names else result.false_alarms
            where.append(f"{script.path.name}: {file.name}:{line} {code}")
        if script.fault is None:
            result.right += 1
            continue
        result.wrong += 1
        if not hit:
            result.missed.append(script.path.stem)
    return result
