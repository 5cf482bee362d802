"""The pages' right examples run, and the wrong ones that fail by themselves fail as their pages say."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from docs.from_code import lint as pages

from lockstep.commands.lint.rule import RULES
from tests.data.formats import write_idx
from tests.lint.calling import OF_GPU, SPAWNING
from tests.subprocesses import Command, Ended

ROOT = Path(__file__).parents[2]
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
FAILING = {  # code -> the error that its page quotes
    "LS103": "ValueError: sampler option is mutually exclusive with shuffle",
    "LS307": "ValueError: Default process group has not been initialized",
    "LS314": "RuntimeError",
}


def run(folder: Path, *argv: str, env: dict[str, str] | None = None) -> Ended:
    here = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONWARNINGS": "default"}
    return Command(sys.executable, *argv, cwd=folder, env=here | (ALONE if env is None else env)).end(timeout=500)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with 40 training and 20 test images in data/MNIST."""
    raw, rng = tmp_path / "data/MNIST/raw", np.random.default_rng(0)
    raw.mkdir(parents=True)
    for part, count in (("train", 40), ("t10k", 20)):
        write_idx(raw / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    return tmp_path


@pytest.mark.slow
def test_the_right_examples_run(folder: Path) -> None:
    codes = sorted(set(RULES) - OF_GPU - SPAWNING)
    ended = run(folder, "-m", "tests.lint.calling", "right", *codes)
    assert ended.code == 0, ended.text
    assert ended.out.splitlines()[-1].split() == codes
    for code in sorted(SPAWNING):
        (folder / "train.py").write_text(pages.read(code, chinese=False).right)
        ended = run(folder, "train.py", env={})
        assert ended.code == 0, ended.text


@pytest.mark.slow
@pytest.mark.parametrize("code", FAILING)
def test_a_wrong_example_fails_as_its_page_says(code: str, folder: Path) -> None:
    (folder / "train.py").write_text(pages.read(code, chinese=False).wrong)
    ended = run(folder, *(["train.py"] if code in SPAWNING else ["-m", "tests.lint.calling", "wrong", code]))
    assert ended.code != 0
    assert FAILING[code] in ended.err, ended.text
    assert FAILING[code] in re.sub(r"\n", " ", pages.page_of(code, chinese=False).read_text())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL has a GPU here")
def test_nccl_on_a_cpu_fails(folder: Path) -> None:
    (folder / "train.py").write_text(pages.read("LS316", chinese=False).wrong)
    assert run(folder, "train.py").code != 0


def costs(text: str) -> dict[str, list[float]]:
    """Fault -> top-1 in percent: mean, lowest, highest."""
    rows = re.findall(r"^ *([\d.]+) +([\d.]+) +([\d.]+)  (.+)$", text, re.MULTILINE)
    return {name: [float(figure) for figure in figures] for *figures, name in rows}


@pytest.mark.slow
def test_faults_cost_what_the_index_says() -> None:
    shown = costs(pages.page_of("index", chinese=False).read_text())
    env = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ended = Command(sys.executable, "examples/lint/costs.py", cwd=ROOT, env=env).end(timeout=500)
    assert ended.code == 0, ended.text
    found = costs(ended.out)
    assert list(found) == list(shown)
    assert len(found) == 12
    for name, figures in found.items():
        assert figures == pytest.approx(shown[name], abs=1.0), name  # another machine rounds otherwise
