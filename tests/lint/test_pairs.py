"""Shapes in pairs: the wrong one is found and nothing else, its right twin comes out clean."""

from pathlib import Path

import pytest

from tests.lint.adjusting import ADJUSTING, SHORT, START
from tests.lint.drawing import DRAWING, DRAWN
from tests.lint.shapes import BEFORE
from tests.lint.styles import STYLES
from tests.lint.test_rules import codes_in
from tests.lint.wrapping import PLAIN, WRAPPED, WRAPPING

IMPORTS = """\
import glob, itertools
import dataclasses
from dataclasses import dataclass
from torchvision import datasets, models, transforms
"""


@pytest.mark.parametrize(
    ("code", "wrong", "right"), ADJUSTING, ids=[f"{each[0]}-{n}" for n, each in enumerate(ADJUSTING)]
)
def test_batch_and_rate(code: str, wrong: str, right: str, tmp_path: Path) -> None:
    for name, text in SHORT.items():
        wrong, right = wrong.replace(name, text), right.replace(name, text)
    assert codes_in(BEFORE + START.replace("BODY", wrong), tmp_path) == [code]
    assert codes_in(BEFORE + START.replace("BODY", right), tmp_path) == []


@pytest.mark.parametrize(("code", "wrong", "right"), DRAWING, ids=[f"{each[0]}-{n}" for n, each in enumerate(DRAWING)])
def test_what_ranks_draw(code: str, wrong: str, right: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + DRAWN.replace("BODY", wrong), tmp_path) == [code]
    assert codes_in(BEFORE + DRAWN.replace("BODY", right), tmp_path) == []


@pytest.mark.parametrize(
    ("code", "wrong", "right"), WRAPPING, ids=[f"{each[0]}-{n}" for n, each in enumerate(WRAPPING)]
)
def test_wrapped_models(code: str, wrong: dict[str, str], right: dict[str, str], tmp_path: Path) -> None:
    for parts, codes in ((wrong, [code]), (right, [])):
        text = WRAPPED
        for name, value in {**PLAIN, **parts}.items():
            text = text.replace(name, value)
        assert codes_in(BEFORE + text, tmp_path) == codes


@pytest.mark.parametrize(
    ("code", "text", "wrong", "right"), [each[1:] for each in STYLES], ids=[each[0] for each in STYLES]
)
def test_styles(code: str, text: str, wrong: str, right: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + IMPORTS + text.replace("@@", wrong), tmp_path) == [code]
    assert codes_in(BEFORE + IMPORTS + text.replace("@@", right), tmp_path) == []
