"""`lockstep reproduce`: a script's experiment as a recipe, and the proof that it is that one."""

import json
from pathlib import Path

import pytest

from lockstep.commands.reproduce.command import _split
from lockstep.config.recipes import recipe
from lockstep.config.toml import applied, read_values
from tests.reproduce import scripts
from tests.subprocesses import run_lockstep


def reproduced(folder: Path, text: str, *flags: str, args: tuple[str, ...] = ()) -> tuple[str, dict[str, list[float]]]:
    """What is said of a script, and the losses of the proof."""
    (folder / "script.py").write_text(text)
    ended = run_lockstep("reproduce", "--out", "out", *flags, "script.py", *args, cwd=folder, timeout=300)
    assert ended.code == 0, ended.text
    proof = json.loads((folder / "out" / "proof.json").read_text())
    return ended.out, {"script": proof[-1]["script"], **proof[-1]["lockstep"]}


def agree(losses: dict[str, list[float]], count: int) -> None:
    for name, values in losses.items():
        assert len(values) == count, name
        assert values == pytest.approx(losses["script"], rel=1e-5), name
    assert len(set(losses["script"])) == count, "the losses would agree if nothing moved"


def test_a_plain_script_with_dropout_and_stairs(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, scripts.PLAIN, "--steps", "4", "--compare", "1")
    agree(losses, 4)
    assert "losses: equal until rounding over 4 steps" in said
    assert "first weights: equal" in said
    assert "images as the recipe reads them: equal" in said
    config = applied(read_values(str(tmp_path / "out" / "recipe.toml")), recipe("digits"), "recipe.toml")
    optim = config.optim
    assert (config.epochs, config.batch_size, config.seed) == (6, 16, 3)
    assert (optim.optimizer, optim.lr, optim.momentum, optim.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    assert (optim.schedule, optim.step_epochs, optim.gamma) == ("step", 2.0, 0.5)
    parts = (tmp_path / "out" / "parts.py").read_text()
    assert "WIDTH = 4" in parts
    assert "DataLoader(" not in parts


def test_flags_stand_before_the_script() -> None:
    assert _split(["--steps", "3", "train.py", "--steps", "5"]) == (["--steps", "3"], "train.py", ["--steps", "5"])
    assert _split(["train.py", "3"]) == ([], "train.py", ["3"])
    assert _split(["--steps=3", "train.py"]) == (["--steps=3"], "train.py", [])
    assert _split(["--help"]) == (["--help"], "", [])


def test_a_script_that_trains_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('nothing here')\n")
    ended = run_lockstep("reproduce", "script.py", cwd=tmp_path, timeout=300)
    assert ended.code == 2, ended.text
    assert "took no step that could be recorded" in ended.err
    assert "nothing here" in ended.err
    assert not (tmp_path / "script-lockstep").exists()
