"""What a linter makes of the corpus: found, missed, false alarms; of all scripts and of the third that is held out.

all_of_it = score(lint, {"LS101": ["no-set-epoch"], ...}, also)
the_third = score(lint, {"LS101": ["no-set-epoch"], ...}, also, "held out")

python -m tests.lint.corpus.score [all|open|"held out"] prints what `lockstep lint` scores.
"""

import ast
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from lockstep.commands.lint.check import check, files
from lockstep.commands.lint.rule import RULES
from tests.lint.corpus.held_out import CORPUS, Script, scripts

Lint = Callable[[Path], Iterable[tuple[str, Path, int]]]  # a file or folder -> (code, file, line) of each finding


@dataclass
class Score:
    """Counts over some scripts, and the cases to look at by name."""

    wrong: int = 0
    right: int = 0
    missed: list[str] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)  # the right name on another statement; not counted as found
    false_alarms: list[str] = field(default_factory=list)  # in right scripts
    others: list[str] = field(default_factory=list)  # in wrong scripts, beside the fault

    @property
    def found(self) -> int:
        return self.wrong - len(self.missed)


@cache
def _spans(path: Path) -> list[tuple[int, int]]:
    """First and last line of each statement; of a compound one its head's."""
    spans = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(part.lineno for part in getattr(node, "decorator_list", []))])
            body = getattr(node, "body", None)
            spans.append((first, body[0].lineno - 1 if body else node.end_lineno or node.lineno))
    return spans


def statement(path: Path, line: int) -> tuple[int, int]:
    """First and last line of the innermost statement at a line; of a compound one its head alone."""
    holding = [(first, last) for first, last in _spans(path) if first <= line <= last]
    return min(holding, key=lambda span: span[1] - span[0], default=(line, line))


def on_the_fault(script: Script, names: set[str], keyword: str, file: Path, line: int) -> bool:
    """Whether a finding names the script's fault, on a statement that holds one of its lines."""
    fault = script.fault
    if fault is None or keyword not in names:
        return False
    places = [(fault.file, fault.line), *fault.others]
    spans = [statement(file, number) for where, number in places if where.resolve() == file.resolve()]
    return any(first <= line <= last for first, last in spans)


def score(
    lint: Lint, keywords: Mapping[str, Iterable[str]], also: Mapping[str, Iterable[str]], part: str = "all"
) -> Score:
    """Run a linter over the corpus, or its part `open` or `held out`.

    `keywords`: code -> those it stands for; `also`: keyword -> others that are as good. A code without a keyword can
    only be a false alarm.
    """
    result = Score()
    for script in [*scripts("right"), *scripts("wrong")]:
        if part != "all" and script.held_out != (part == "held out"):
            continue
        names = {script.fault.keyword, *also.get(script.fault.keyword, ())} if script.fault else set()
        hit = False
        for code, file, line in lint(script.path):
            meant = set(keywords.get(code, ())) & names
            if any(on_the_fault(script, names, keyword, file, line) for keyword in meant):
                hit = True
                continue
            elsewhere = result.others if script.fault else result.false_alarms
            where = result.misplaced if meant else elsewhere
            where.append(f"{script.path.name}: {file.name}:{line} {code}")
        if script.fault is None:
            result.right += 1
            continue
        result.wrong += 1
        if not hit:
            result.missed.append(script.path.stem)
    return result


def also() -> dict[str, list[str]]:
    """Keyword -> the others under which a report of the same lines is as good."""
    table = tomllib.loads((CORPUS / "keywords.toml").read_text(encoding="utf-8"))
    return {keyword: entry.get("also", []) for keyword, entry in table.items()}


def codes() -> dict[str, list[str]]:
    """Lint's codes -> the keywords that each stands for."""
    table: dict[str, list[str]] = tomllib.loads((CORPUS / "codes.toml").read_text(encoding="utf-8"))
    return table


def lockstep_lint(path: Path) -> list[tuple[str, Path, int]]:
    """What `lockstep lint` finds in a file or a folder."""
    found, broken = check(files([path]), frozenset(RULES))
    assert not broken, broken
    return [(each.code, each.path, each.line) for each in found]


def main(part: str = "all") -> None:
    """Print the score of `lockstep lint`, and the cases to look at."""
    result = score(lockstep_lint, codes(), also(), part)
    for name in ("missed", "misplaced", "false_alarms", "others"):
        for case in getattr(result, name):
            print(f"{name:<13}{case}")
    print(
        f"{part}: {result.found} of {result.wrong} wrong scripts found ({result.found / result.wrong:.1%}), "
        f"{len(result.missed)} missed, {len(result.misplaced)} reports misplaced; "
        f"{len(result.false_alarms)} false alarms in {result.right} right scripts"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
