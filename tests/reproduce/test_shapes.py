"""Half precision, compiling, and what is refused: by scripts that have them."""

import sys
from pathlib import Path

import pytest

from lockstep.commands.shared.arguments import planned
from lockstep.config import Config
from tests.reproduce import shapes
from tests.reproduce.test_reproduce import agree, reproduced
from tests.subprocesses import Command, run_lockstep

pytestmark = pytest.mark.slow
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}  # a compiler would take a minute


def _config(folder: Path) -> Config:
    return planned("train", lambda config: config, ["--config", str(folder / "out" / "recipe.toml")])


def test_a_scaler_and_a_lambda(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.MODERN, "--steps", "5")
    agree(losses, 5)
    config = _config(tmp_path)
    assert (config.precision, config.model.compile, config.model.channels_last) == ("fp16", True, True)
    assert (config.optim.clip_norm, config.optim.label_smoothing) == (1.0, 0.1)
    for part in (
        "losses: equal until rounding over 5 steps\n",
        "learning rates of its steps: equal",
        "a copy of the model is evaluated, as moving averages of weights are",
        "the recipe has --precision fp16",
        "the recipe has --compile",
    ):
        assert part in said, said
    assert "LS201" not in said, "a scaler's factor is no fault"
    ended = Command(sys.executable, "train.py", cwd=tmp_path / "out", env=NOT_COMPILED).end(300)
    assert ended.code == 0, ended.text
    assert "epoch 4: top-1" in ended.out


def test_gradients_clipped_before_they_are_unscaled_are_replayed_so(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.CLIPPED_TOO_EARLY, "--steps", "4", "--compare", "1")
    agree(losses, 4)
    assert "LS207: gradients are clipped before they are unscaled" in said
    assert "(they were 65,536 times too large)" in said
    assert _config(tmp_path).optim.clip_norm == 1.0, "the fault is not copied"


def test_bfloat16_and_binary_cross_entropy(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.BY_HAND, "--steps", "4")
    agree(losses, 4)
    config = _config(tmp_path)
    assert (config.precision, config.model.compile, config.optim.loss) == ("bf16", True, "bce")
    assert config.optim.optimizer == "adamw"
    assert "a copy of the model is evaluated" in said
    command = ("train", "--config", "recipe.toml", "--nproc", "1", "--out", "run")
    ended = run_lockstep(*command, cwd=tmp_path / "out", env=NOT_COMPILED, timeout=300)
    assert ended.code == 0, ended.text


@pytest.mark.parametrize("what", shapes.REFUSED)
def test_what_is_refused_is_told_with_its_line(tmp_path: Path, what: str) -> None:
    body, why = shapes.REFUSED[what]
    (tmp_path / "script.py").write_text(shapes.loop(body))
    ended = run_lockstep("reproduce", "--steps", "3", "script.py", cwd=tmp_path, timeout=300)
    assert ended.code == 2, ended.text
    assert why in " ".join(ended.err.split())
    assert not (tmp_path / "script-lockstep").exists()


def test_what_lies_between_loader_and_model_is_not_taken_over_and_told(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.BETWEEN, "--steps", "3", "--compare", "1")
    agree(losses, 3)
    assert "images are changed between the loader and the model (script.py:19)" in said
    assert "the schedule: it moves the rate within an epoch" in said
