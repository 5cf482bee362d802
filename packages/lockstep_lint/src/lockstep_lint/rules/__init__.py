"""The rules, by code. A rule's docstring is its page: a title, what becomes of the run, a wrong and a right example."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lockstep_lint.facts.modules import Scope
from lockstep_lint.facts.training import Facts

Places = Iterator[tuple[ast.AST, Scope, str]]  # a node, its scope, and a detail to be printed behind the title
Check = Callable[[Facts], Places]


@dataclass(frozen=True)
class Rule:
    """A rule and its page."""

    code: str
    name: str
    check: Check

    @property
    def paragraphs(self) -> list[str]:
        """The title, what becomes of the run, and what else there is to say, each in one line."""
        text = self._page.partition("\nWrong:")[0]
        return [" ".join(each.split()) for each in text.strip().split("\n\n")]

    @property
    def title(self) -> str:
        """One line without a full stop."""
        return self.paragraphs[0].rstrip(".")

    @property
    def result(self) -> str:
        """What becomes of the run."""
        return self.paragraphs[1]

    @property
    def wrong(self) -> str:
        """Lines with the fault."""
        return inspect.cleandoc("\n" + self._page.partition("\nWrong:\n")[2].partition("\nRight:\n")[0])

    @property
    def right(self) -> str:
        """The same lines without it."""
        return inspect.cleandoc("\n" + self._page.partition("\nRight:\n")[2])

    @property
    def _page(self) -> str:
        return inspect.getdoc(self.check) or ""


RULES: dict[str, Rule] = {}


def rule(code: str, name: str) -> Callable[[Check], Check]:
    """Enters a function among the rules."""

    def enter(check: Check) -> Check:
        RULES[code] = Rule(code, name, check)
        return check

    return enter


def all_rules() -> dict[str, Rule]:
    """The rules in the order of their codes."""
    from lockstep_lint.rules import data, devices, files, maths, processes  # noqa: F401 (they enter their rules)

    return dict(sorted(RULES.items()))
