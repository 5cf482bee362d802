"""Each rule on right scripts, and on the same scripts with one fault put in: that fault is found, and nothing else."""

import json
from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from lockstep.commands.lint.rule import RULES
from tests.lint.field import FIELD
from tests.lint.followed import FOLLOWED
from tests.lint.launches import LAUNCHES
from tests.lint.mutations import OWN, RIGHT, WRONG
from tests.lint.orders import ORDERS
from tests.lint.processes import PROCESSES
from tests.lint.shapes import BEFORE, SHAPES
from tests.lint.strangers import STRANGERS
from tests.lint.values import VALUES

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "right").glob("*.py"))
EVERY = frozenset(RULES)
PROGRAMS = [*FIELD, *VALUES, *PROCESSES, *LAUNCHES, *ORDERS, *STRANGERS, *FOLLOWED]


def codes_in(text: str, folder: Path) -> list[str]:
    path = folder / "script.py"
    path.write_text(text)
    found, broken = check([path], EVERY)
    assert not broken
    return sorted({each.code for each in found})


def mutated(script: str, old: str, new: str) -> str:
    text = (HERE / "right" / f"{script}.py").read_text()
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_right_scripts_come_out_clean(path: Path) -> None:
    assert check([path], EVERY) == ([], [])


@pytest.mark.parametrize(("script", "codes", "old", "new"), WRONG, ids=lambda value: value if len(value) < 12 else "")
def test_a_fault_is_found_and_nothing_else(script: str, codes: str, old: str, new: str, tmp_path: Path) -> None:
    assert codes_in(mutated(script, old, new), tmp_path) == codes.split()


@pytest.mark.parametrize(("script", "codes", "old", "new"), RIGHT)
def test_another_right_way_is_left_alone(script: str, codes: str, old: str, new: str, tmp_path: Path) -> None:
    found = codes_in(mutated(script, old, new), tmp_path)
    assert not set(codes.split()) & set(found)


@pytest.mark.parametrize(("codes", "text"), OWN)
def test_scripts_of_their_own(codes: str, text: str, tmp_path: Path) -> None:
    assert codes_in(text, tmp_path) == codes.split()


@pytest.mark.parametrize(
    ("codes", "text"), SHAPES, ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(SHAPES)]
)
def test_other_shapes(codes: str, text: str, tmp_path: Path) -> None:
    assert codes_in(BEFORE + text, tmp_path) == sorted(codes.split())


@pytest.mark.parametrize(
    ("codes", "files"),
    PROGRAMS,
    ids=[f"{codes or 'right'}-{n}" for n, (codes, _) in enumerate(PROGRAMS)],
)
def test_what_real_code_does(codes: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text if "import torch\n" in text else BEFORE + text)
    found, broken = check([tmp_path / f"{next(iter(files))}.py"], EVERY)
    assert not broken
    assert sorted({each.code for each in found}) == sorted(codes.split())


def test_every_code_has_a_wrong_and_a_right_script() -> None:
    wrong = {code for _, codes, _, _ in WRONG for code in codes.split()} | {
        c for codes, _ in OWN for c in codes.split()
    }
    assert wrong == EVERY
    assert {path.stem for path in SCRIPTS} == {script for script, _, _, _ in WRONG}


def test_codes_are_numbered_by_part_and_told_in_full() -> None:
    for code, rule in RULES.items():
        assert code[:3] in ("LS1", "LS2", "LS3", "LS4")
        assert rule.find.__doc__
        for words in (rule.title, rule.result, rule.why, rule.mend):
            assert words, code
        for words in (rule.title, rule.result, rule.why):
            assert not words.endswith("."), f"{code}: {words}"
    assert len({rule.name for rule in RULES.values()}) == len(RULES)
    assert json.dumps(sorted(RULES))
