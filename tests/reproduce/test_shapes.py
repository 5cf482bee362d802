"""Half precision, compiling, averages of the weights, and what is refused: by scripts that have them."""

import sys
from pathlib import Path

import pytest

from lockstep.config import Config
from lockstep.config.recipes import recipe
from lockstep.config.toml import applied, read_values
from tests.reproduce import shapes
from tests.reproduce.test_reproduce import agree, reproduced
from tests.subprocesses import Command, run_lockstep

pytestmark = pytest.mark.slow
NOT_COMPILED = {"TORCHDYNAMO_DISABLE": "1"}  # a compiler would take a minute


def _config(folder: Path) -> Config:
    return applied(read_values(str(folder / "out" / "recipe.toml")), recipe("digits"), "recipe.toml")


def test_a_scaler_an_average_and_a_lambda(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.MODERN, "--steps", "5")
    agree(losses, 5)
    config = _config(tmp_path)
    assert (config.precision, config.model.compile, config.model.channels_last) == ("fp16", True, True)
    assert (config.optim.ema, config.optim.clip_norm, config.optim.label_smoothing) == (0.9, 1.0, 0.1)
    for part in (
        "losses: equal until rounding over 5 steps\n",
        "learning rates of its steps: equal",
        "moving average of the weights: ",
        "the recipe has --precision fp16",
        "the recipe has --compile",
        "nothing that was seen",
    ):
        assert part in said, said
    assert "LS201" not in said, "a scaler's factor is no fault"
    assert "moving average of the weights: others" not in said
    apart = said.split("moving average of the weights: ")[1].split()[0]
    assert apart == "equal" or float(apart) < 1e-6
    ended = Command(sys.executable, "train.py", cwd=tmp_path / "out", env=NOT_COMPILED).end(300)
    assert ended.code == 0, ended.text
    assert "epoch 4: top-1" in ended.out


def test_gradients_clipped_before_they_are_unscaled_are_replayed_so(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.CLIPPED_TOO_EARLY, "--steps", "4", "--compare", "1")
    agree(losses, 4)
    assert "LS207 line" in said
    assert "(they were 65,536 times too large)" in said
    assert _config(tmp_path).optim.clip_norm == 1.0, "the fault is not copied"


def test_bfloat16_and_an_average_by_hand(tmp_path: Path) -> None:
    said, losses = reproduced(tmp_path, shapes.BY_HAND, "--steps", "4")
    agree(losses, 4)
    config = _config(tmp_path)
    assert (config.precision, config.model.compile, config.optim.loss) == ("bf16", True, "bce")
    assert (config.optim.optimizer, config.optim.ema) == ("adamw", 0.99)
    assert "the moving average begins with the weights after the first step" in said
    command = ("train", "--config", "recipe.toml", "--nproc", "1", "--out", "run")
    ended = run_lockstep(*command, cwd=tmp_path / "out", env=NOT_COMPILED, timeout=300)
    assert ended.code == 0, ended.text


@pytest.mark.parametrize(("cap", "first", "found"), [(0.35, 1, 0.35), (0.9999, 0, 0.999)])
def test_an_average_that_warms_up(tmp_path: Path, cap: float, first: int, found: float) -> None:
    said, losses = reproduced(tmp_path, shapes.WARMED.format(cap=cap, first=first), "--steps", "6")
    agree(losses, 6)
    optim = _config(tmp_path).optim
    assert (optim.ema, optim.ema_warmup) == (found, True)
    assert ("no step came to it; the recipe has 0.999" in said) == (cap != found)
    assert ("counts updates from 0, the script's from 1" in said) == (first == 1)
    apart = said.split("moving average of the weights: ")[1].split()[0]
    assert apart == "equal" or float(apart) < 1e-6


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
    assert "moves the rate within an epoch (script.py:18)" in said
