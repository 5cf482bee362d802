"""The range test of the learning rate: the rates, the curve's reading, and the same curve on any number of ranks."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lockstep.commands.lr_find import Plan, described, find, read_curve, smoothed
from lockstep.config import Config, DataConfig, ModelConfig, OptimConfig
from lockstep.errors import UserError
from tests.inprocess import said
from tests.ranks import alone, run_ranks

CONFIG = Config(
    batch_size=30,
    data=DataConfig(dataset="digits", fraction=0.1),  # 144 samples: 5 steps an epoch, the last of 24
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(optimizer="adamw", lr=0.01, schedule="one-cycle", warmup_epochs=1, ema=0.9),
    exact=4,
)


def plan(file: Path, **fields: Any) -> Plan:
    return Plan(config=CONFIG, file=str(file), **{"steps": 24, "lr_min": 1e-5, "lr_max": 100.0, **fields})


def test_the_curve_is_the_same_on_any_number_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone(find, plan(tmp_path / "one.png"))
    run_ranks(find, 3, plan(tmp_path / "three.png"), timeout=240)
    one, *others = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "three"))
    assert one["lr"][0] == 1e-5
    ratios = np.diff(np.log(one["lr"]))
    assert ratios == pytest.approx([math.log(1e7) / 23] * len(ratios)), "each step by the same factor, whatever --lr"
    assert one["diverged"]
    assert 1e-4 < one["suggestion"] < one["lowest"] < one["lr"][-1]
    for other in others:
        assert other["lr"] == one["lr"]
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-12)
        assert other["suggestion"] == one["suggestion"]
    assert f"--lr {one['suggestion']:.2g}" in capsys.readouterr().out
    with Image.open(tmp_path / "one.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 5, "something is drawn"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.{end}" for name in ("one", "three") for end in ("png", "json")
    ), "and nothing else is left"


@given(st.floats(0.1, 5), st.integers(20, 200), st.integers(1, 150))
def test_a_constant_is_its_own_mean_and_a_line_keeps_its_place(value: float, steps: int, count: int) -> None:
    assert smoothed([value] * count, steps) == pytest.approx([value] * count)
    line = [value * i for i in range(count)]
    reach = max(1, round(0.05 * steps))
    inner = slice(reach, max(reach, count - reach))
    assert smoothed(line, steps)[inner] == pytest.approx(line[inner])


def test_the_suggestion_is_where_the_curve_is_steepest() -> None:
    lr = [float(x) for x in np.geomspace(1e-6, 1, 121)]
    fall = [2.3 - 2 / (1 + math.exp(-4 * (math.log10(x) + 3))) for x in lr]  # steepest at 1e-3
    found = read_curve(lr, fall, 121)
    assert found["suggestion"] == pytest.approx(1e-3, rel=0.1)
    assert not found["diverged"]
    rises = read_curve(lr, [1.0 + i for i in range(121)], 121)
    assert rises["suggestion"] is None
    assert "fell nowhere" in described(rises)
    blown = read_curve(lr, [*fall[:100], math.nan], 121)
    assert blown["diverged"]
    assert len(blown["lr"]) == 100
    with pytest.raises(UserError, match=r"no number after 2 step\(s\)"):
        read_curve(lr, [1.0, 1.0, math.inf], 121)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_min": 0.0}, "--lr-min 0"),
        ({"lr_min": 1.0, "lr_max": 0.5}, "--lr-min 1 is not between"),
        ({"steps": 3}, "--steps 3"),
        ({"file": "x.jpg"}, "--file x.jpg"),
    ],
)
def test_refusals(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan(**fields)


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr-find.json").touch()
    assert "lr-find.json" in said(capsys, "lr-find", "digits", code=2)[1]
    for words in (("lr-find", "digits", "--file"), ("report", ".", "--out")):
        assert "there is no folder no to write x.png into" in said(capsys, *words, "no/x.png", code=2)[1]
