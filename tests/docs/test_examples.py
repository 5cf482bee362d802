"""The examples and the README's loop, run as they say of themselves."""

import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep as ls
from tests.journals import read
from tests.ranks import run_ranks
from tests.subprocesses import Command, run_lockstep

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ACCURACY = re.compile(r"epoch (\d+): top-1 ([\d.]+)%.*\(360 images\)")


def _accuracies(out: str) -> list[float]:
    found = ACCURACY.findall(out)
    assert [number for number, _ in found] == [str(number) for number in range(1, 11)], out
    return [float(value) for _, value in found]


def test_own_loop_is_at_most_15_lines() -> None:
    tree = ast.parse((EXAMPLES / "own_loop.py").read_text())
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert (main.end_lineno or 0) - main.lineno <= 15


def test_own_loop_learns_as_a_plain_script(tmp_path: Path) -> None:
    ended = Command(sys.executable, str(EXAMPLES / "own_loop.py"), cwd=tmp_path, warm=True).end(timeout=120)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    assert _accuracies(ended.out)[-1] > 96
    assert not list(tmp_path.iterdir()), "a loop of one's own writes nothing unasked"


@pytest.mark.integration
@pytest.mark.parametrize("nproc", [1, 3])
def test_own_loop_learns_under_torchrun(nproc: int, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    ended = Command(*torchrun, str(EXAMPLES / "own_loop.py"), cwd=tmp_path, env=quiet).end(timeout=180)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    assert _accuracies(ended.out)[-1] > 96


def test_own_parts_train_together(tmp_path: Path) -> None:
    args = ("train", "own_parts:recipe", "--nproc", "2", "--epochs", "3", "--out", str(tmp_path / "run"))
    ended = run_lockstep(*args, cwd=EXAMPLES, timeout=120)
    assert ended.code == 0, ended.text
    end = read(tmp_path / "run" / "journal.jsonl")[-1]
    assert end["status"] == "completed"
    assert end["top1"] > 0.95


def test_own_parts_fit_into_another_recipe(tmp_path: Path) -> None:
    flags = ("--dataset", "own_parts:shapes", "--epochs", "1", "--nproc", "1", "--threads", "1")
    ended = run_lockstep("train", *flags, "--out", str(tmp_path / "run"), cwd=EXAMPLES, timeout=120)
    assert ended.code == 0, ended.text
    run = read(tmp_path / "run" / "journal.jsonl")
    assert run[0]["data"]["name"] == "own_parts:shapes/train"
    assert run[-1]["top1"] > 0.9


def _own_loops(world: ls.World, names: Sequence[str]) -> dict[str, list[float]]:
    """The losses of the recipes for loops of one's own, by name; and what refuses a loss that says not what it is."""
    found = {name: _module(EXAMPLES / "own_loops" / f"{name}.py").main(world) for name in names}
    contrastive = _module(EXAMPLES / "own_loops/contrastive.py")
    train, _ = ls.loaders("digits", world, batch_size=128, fraction=0.1)
    torch.manual_seed(0)
    model = ls.parallelize(contrastive.Encoder(), world)
    for loss in (contrastive.supervised_contrastive, contrastive.in_batch_negatives):
        step = ls.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ls.UserError, match="whole_batch=True"):
            step(next(train.epoch(0)))
    return found


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recipes_for_own_loops_have_the_same_losses_on_two_processes() -> None:
    names = sorted(path.stem for path in (EXAMPLES / "own_loops").glob("*.py"))
    page = (ROOT / "docs/own-loop.md").read_text()
    assert len(names) == page.count("```python") == 7
    alone = _own_loops(ls.World.single(), names)
    for found in run_ranks(_own_loops, 2, names):
        for name in names:
            assert found[name] == pytest.approx(alone[name], rel=2e-5), name
    for name in ("own_sampler", "semi_supervised", "several_labels"):  # evaluations after each epoch
        assert alone[name][-1] < 0.7 * alone[name][0], f"{name} learns nothing: {alone[name]}"


def _code(page: str) -> str:
    return re.findall(r"```python\n(import torch,.*?)```", (ROOT / page).read_text(), re.DOTALL)[0]


@pytest.mark.slow
def test_the_loop_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_code("README.md"))
    ended = Command(sys.executable, str(script), cwd=tmp_path, warm=True).end(timeout=120)
    assert ended.code == 0, ended.text
    lines = ended.out.splitlines()
    assert len(lines) == 10, ended.text
    assert float(lines[-1].split("%")[0].removeprefix("top-1 ")) > 90


def test_both_readmes_print_one_loop() -> None:
    bare = [re.sub(r" *#.*", "", _code(page)) for page in ("README.md", "README.zh-CN.md")]
    assert bare[0] == bare[1]


def test_the_pieces_fit_in_a_world_of_one() -> None:
    world = ls.World.single()
    train, val = ls.loaders("digits", world, batch_size=100, fraction=0.5)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert ls.parallelize(model, world) is model
    step = ls.TrainStep(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.5))
    before = ls.evaluate(model, val, world)
    counts = [batch.count for epoch in train.epochs(3) for batch in epoch if step(batch).isfinite()]
    after = ls.evaluate(model, val, world)
    assert counts == [100] * 7 + [18] + [100] * 7 + [18] + [100] * 7 + [18]
    assert isinstance(after, ls.Metrics)
    assert after == ls.evaluate(model, val, world)
    assert before.count == after.count == 360
    assert after.top1 > 0.8 > before.top1
