"""The programs that the pages show run: those of a loop of one's own on two processes, the others beside a trained run.

Programs are the same in both languages but for comments (tests/docs/test_chinese.py), so the English pages' are run.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.docs.test_chinese import DOCS, sections
from tests.subprocesses import Command, run_lockstep

pytestmark = pytest.mark.slow
# what the pages take as given, where they speak of a loop of one's own
GIVEN = '''"""A page's programs, in a loop of one's own."""
import torch
import torch.nn.functional as F
from torch import nn

import lockstep as ls


def main(world):
    for program in PROGRAMS:
        torch.manual_seed(0)
        train, _ = ls.loaders("digits", world, batch_size=64)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        (batches,) = (list(epoch) for epoch in train.epochs(1))
        model = net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = train_step = ls.TrainStep(model, F.cross_entropy, optimizer)
        names = {**globals(), **locals(), "write_plots": lambda: None}
        exec(compile(program, "page", "exec"), names)
        if "exact=8" in program:
            for epoch in names["train"].epochs(1):
                losses = [names["step"](batch) for batch in epoch]
        world.print("ran", program.split("(")[0].splitlines()[-1])


if __name__ == "__main__":
    ls.launch(main, nproc=2)
'''


def programs(page: str) -> list[str]:
    found = [block for section in sections((DOCS / page).read_text(encoding="utf-8")) for block in section.blocks]
    return ["\n".join(lines) + "\n" for fence, *lines in found if fence == "```python"]


def test_programs_of_a_loop_of_ones_own_run_on_two_processes(tmp_path: Path) -> None:
    pages = ["checkpoints.md", "faults.md", "slow-links.md", "exact.md"]  # the last one sets what stays set
    shown = [program for page in pages for program in programs(page)]
    assert len(shown) == 4
    (tmp_path / "loop.py").write_text(GIVEN.replace("PROGRAMS", repr(shown)))
    ended = Command(sys.executable, "loop.py", cwd=tmp_path, warm=True).end(timeout=240)
    assert ended.code == 0, ended.text
    assert ended.out.count("ran ") == 4
    assert not ended.orphans


def test_programs_beside_a_trained_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_lockstep("train", "digits", "--epochs", "1", "--out", "runs/mine", "--nproc", "1", cwd=tmp_path)
    assert ended.code == 0, ended.text
    shutil.copytree("runs/mine", "runs/flowers")
    for name in ("photo.jpg", "other.jpg"):
        Image.new("L", (20, 30), 90).save(tmp_path / name)
    (classify,), (journal,) = programs("guide.md"), programs("run-folder.md")
    given: dict[str, Any] = {}
    exec(compile(classify, "guide.md", "exec"), given)
    assert given["logits"].shape == (1, 10)
    assert len(given["found"].classes) == 3
    exec(compile(journal, "run-folder.md", "exec"), given)
    assert [record["kind"] for record in given["steps"]][:1] == ["step"]


def test_a_function_for_pictures() -> None:
    import torch

    given: dict[str, Any] = {}
    exec(compile(programs("photos.md")[0], "photos.md", "exec"), given)
    picture = given["film"](torch.full((3, 8, 8), 100, dtype=torch.uint8))
    assert picture.dtype == torch.uint8


def test_the_patch_is_found_out_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(programs("verify.md")[0])
    asked = ["digits", "--nproc", "1,2", "--steps", "4", "--threads", "1", "--no-vary", "--patch", "mine:patch"]
    same = {"PYTHONHASHSEED": "0"}  # else each run has an interpreter of its own
    ended = run_lockstep("verify", *asked, cwd=tmp_path, env=same, timeout=240)
    assert ended.code == 1, ended.text
    assert "differs: from step 1: learning rate" in ended.out


def test_the_suggested_rate_is_the_pages(tmp_path: Path) -> None:
    console = (DOCS / "guide.md").read_text(encoding="utf-8").split("$ lockstep lr-find digits\n")[1].splitlines()[:2]
    ended = run_lockstep("lr-find", "digits", "--nproc", "1", cwd=tmp_path, timeout=120)
    assert ended.code == 0, ended.text
    said = [line for line in ended.out.splitlines() if line.startswith(("suggestion", "picture"))]
    number = re.compile(r"\d\.\d+")
    assert [number.sub("#", line) for line in said] == [number.sub("#", line) for line in console]
    ours, theirs = ([float(found) for found in number.findall(line)] for line in (said[0], console[0]))
    assert all(1 / 1.5 < a / b < 1.5 for a, b in zip(ours, theirs, strict=True)), said[0]
