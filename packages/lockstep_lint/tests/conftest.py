"""Base scripts that are right, and a fixture that lints changed copies of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep_lint.check import Finding, check
from lockstep_lint.rules import all_rules

Lint = Callable[..., list[Finding]]


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lint:
    """Writes files (one text is train.py) and returns what all rules, or some, find in them."""

    def run(files: str | dict[str, str], *codes: str) -> list[Finding]:
        monkeypatch.chdir(tmp_path)
        for name, text in ({"train.py": files} if isinstance(files, str) else files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        rules = [rule for rule in all_rules().values() if not codes or rule.code in codes]
        report = check([Path()], rules)
        assert report.unread == {}
        return report.findings

    return run
