"""Scripts that differ in when they update and step: each with a fault beside its right twin."""

from pathlib import Path

import pytest

from tests.lint.accumulating import ACCUMULATING
from tests.lint.clipping import CLIPPING
from tests.lint.schedules import SCHEDULES
from tests.lint.shapes import BEFORE
from tests.lint.sparing import SPARING
from tests.lint.test_rules import codes_in


@pytest.mark.parametrize(
    ("codes", "text"), SCHEDULES, ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(SCHEDULES)]
)
def test_schedules(codes: str, text: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + text, tmp_path) == codes.split()


@pytest.mark.parametrize(
    ("codes", "text"), ACCUMULATING, ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(ACCUMULATING)]
)
def test_accumulation(codes: str, text: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + text, tmp_path) == codes.split()


@pytest.mark.parametrize(
    ("codes", "text"), CLIPPING, ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(CLIPPING)]
)
def test_clipping(codes: str, text: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + text, tmp_path) == codes.split()


@pytest.mark.parametrize(
    ("codes", "text"), SPARING, ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(SPARING)]
)
def test_no_sync(codes: str, text: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + text, tmp_path) == codes.split()
