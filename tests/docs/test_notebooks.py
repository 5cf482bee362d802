"""The notebooks: kept without outputs, alike in both languages, and executed by a real kernel."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.subprocesses import Command

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples/notebooks"
NAMES = ("first_steps", "your_own_photos")


def cells(name: str, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_there_are_no_others() -> None:
    both = {f"{name}{end}.ipynb" for name in NAMES for end in ("", ".zh")}
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == both


@pytest.mark.parametrize("name", NAMES)
def test_both_languages_have_the_same_code(name: str) -> None:
    english, chinese = (cells(f"{name}{end}.ipynb", "code") for end in ("", ".zh"))
    assert english == chinese
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in english)
    assert len(cells(f"{name}.ipynb", "markdown")) == len(cells(f"{name}.zh.ipynb", "markdown"))


@pytest.mark.parametrize("name", [f"{name}{end}.ipynb" for name in NAMES for end in ("", ".zh")])
def test_links_lead_somewhere(name: str) -> None:
    text = "".join("".join(cell["source"]) for cell in cells(name, "markdown"))
    assert [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not (NOTEBOOKS / target).exists()] == []


def executed(name: str, folder: Path) -> list[str]:
    """What each code cell printed."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # with sys.executable first, `!lockstep` is the command of this environment
    env = {"PYTHONWARNINGS": "default", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder)}
    command = (sys.executable, "-m", "tests.docs.notebooks", str(NOTEBOOKS / f"{name}.ipynb"), str(folder))
    ended = Command(*command, cwd=ROOT, env=env).end(timeout=560)
    assert ended.code == 0, ended.text
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.slow
def test_first_steps(tmp_path: Path) -> None:
    """With `launch(train, nproc=2)` of a function that a cell defines."""
    _, _, one, two, copied, exact, failed = executed("first_steps", tmp_path)
    losses = [float(value) for value in re.findall(r"[\d.]+(?=[,\]])", one)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    assert two.startswith("2 values\n")
    assert float(two.split("largest difference:")[1]) < 1e-5
    assert re.search(r"here: +69 steps, top-1 \d", copied)
    assert re.search(r"copied: +36 steps, top-1 \d", copied)
    digests = exact.splitlines()[-2:]
    assert len(digests[0]) == 64
    assert digests[0] == digests[1]
    assert "rank 1: ValueError: a mistake on rank 1 alone" in failed


@pytest.mark.slow
def test_your_own_photos(tmp_path: Path) -> None:
    _, preview, train, scores, named = executed("your_own_photos", tmp_path)
    assert "preview.png: 4 pictures of 32x32" in preview
    assert float(re.findall(r"test accuracy ([\d.]+)%", train)[0]) > 80
    assert "mean over classes: precision" in scores
    assert len(re.findall(r"^(circle|square|triangle) -> ", named, re.MULTILINE)) == 3
