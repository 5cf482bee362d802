"""What loops read, in shapes of real code: the fault is found, and its twin without the fault is left alone."""

import tomllib
from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from lockstep.commands.lint.rule import RULES
from tests.lint.reading import CASES as READING
from tests.lint.samples import CASES
from tests.lint.shapes import BEFORE

MINE = frozenset(f"LS{number}" for number in range(101, 112))
IMPORTS = """\
import argparse, functools, glob, itertools, math
from pathlib import Path
from torchvision import datasets, models, transforms
from torchvision.transforms import v2
"""
WRITTEN = tomllib.loads((Path(__file__).parent / "twins.toml").read_text(encoding="utf-8"))["twin"]
TWINS = [
    *CASES,
    *READING,
    *((each["name"], each["code"], each["text"], each.get("wrong"), each["right"]) for each in WRITTEN),
]


def codes_in(text: str, folder: Path) -> set[str]:
    path = folder / "script.py"
    path.write_text(BEFORE + IMPORTS + text)
    found, broken = check([path], MINE)
    assert not broken
    return {each.code for each in found}


@pytest.mark.parametrize(
    ("code", "text", "wrong", "right"), [each[1:] for each in TWINS], ids=[each[0] for each in TWINS]
)
def test_a_fault_and_its_twin(code: str, text: str, wrong: str | None, right: str, tmp_path: Path) -> None:
    assert code in RULES
    assert codes_in(text.replace("@@", right), tmp_path) == set()
    if wrong is not None:
        assert codes_in(text.replace("@@", wrong), tmp_path) == {code}
