"""Sweeps: which runs there are, that they go on, and the table's means, intervals and pairs."""

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands.sweep.command import _joined
from lockstep.commands.sweep.plan import Plan
from lockstep.commands.sweep.run import sweep
from lockstep.commands.sweep.table import interval, markdown, summary
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.training.loop import train

BASE = Config(
    batch_size=30,
    epochs=1,
    data=DataConfig(dataset="digits", fraction=0.1),
    model=ModelConfig(model="tests.parallel.test_exact:small_net"),
    optim=OptimConfig(optimizer="adamw", lr=0.01),
    execution=Execution(nproc=1, eval_batch_size=200, device="cpu"),
)


def plan(*vary: str, out: str = "") -> Plan:
    return Plan(tuple(part for text in vary for part in text.split(",")), BASE.with_execution(out=out))


def test_every_combination_is_a_run_that_differs_in_those_flags_alone() -> None:
    made = plan("learning-rate=0.1,0.2", "flip=true,false", "seed=3,4").variants()
    assert len(made) == len({variant.folder for variant in made}) == 8
    assert [variant.setting for variant in made[::2]] == [
        f"lr={lr} flip={flip}" for lr in ("0.1", "0.2") for flip in ("true", "false")
    ]
    for variant in made:
        config = variant.config.to_dict()
        lr, flip = variant.setting.split()
        assert config["optim"].pop("lr") == float(lr.removeprefix("lr="))
        assert config["data"].pop("flip") is (flip == "flip=true")
        assert config.pop("seed") == variant.seed
        plain = BASE.to_dict()
        del plain["optim"]["lr"], plain["data"]["flip"], plain["seed"]
        assert config == plain


def test_words_of_several_flags_are_one() -> None:
    words = ["digits", "--vary", "lr=0.1,0.2", "--epochs", "3", "--vary=seed=0,1"]
    assert _joined(words) == ["digits", "--epochs", "3", "--vary=lr=0.1,0.2,seed=0,1"]
    assert _joined(["digits"]) == ["digits"]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (("lrr=0.1",), "unknown flag in --vary 'lrr'\n  Did you mean lr"),
        (("out=a,b",), "unknown flag in --vary 'out'"),
        (("0.1",), "--vary 0.1: the name is missing"),
        (("lr=0.1,0.1",), "lr: 0.1 stands there twice"),
        (("lr=0.1", "learning-rate=0.2"), "--vary lr stands there twice"),
        (("lr=fast",), "not a number"),
        (("flip=maybe",), "--vary flip=maybe"),
        (("lr=-1",), "--lr -1.0 is not positive"),
        ((), "nothing varies"),
    ],
)
def test_refusals(vary: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*vary).variants()
    assert message in str(caught.value)


def test_runs_share_their_draws_and_what_is_missing_is_run(tmp_path: Path) -> None:
    out, ran = str(tmp_path / "swept"), list[str]()

    def here(config: Config, place: Path) -> int:
        ran.append(place.name)
        (place / "weights").mkdir(parents=True)
        if config.optim.lr == 0.03 and config.seed == 1 and len(ran) < 5:
            (place / "output.txt").write_text("lockstep: no space left\n")
            return 2
        train(config, World.single(), place)
        return 0

    said = list[str]()
    first = sweep(plan("lr=0.01,0.03", "seed=0,1", out=out), said.append, here)
    assert ran == ["lr=0.01_seed=0", "lr=0.01_seed=1", "lr=0.03_seed=0", "lr=0.03_seed=1"]
    assert [row["failed"] for row in first["rows"]] == ["", "", "", "no space left"]
    assert any("lr=0.03, seed 1 failed: no space left" in line for line in said)
    (tmp_path / "swept/lr=0.03_seed=1/weights").rmdir()
    second = sweep(plan("lr=0.01,0.03,0.05", "seed=0,1", out=out), said.append, here)
    assert ran[4:] == ["lr=0.03_seed=1", "lr=0.05_seed=0", "lr=0.05_seed=1"], "what is there is not run again"
    ledgers = {(row["setting"], row["seed"]): row["ledger_sha256"] for row in second["rows"]}
    assert len(set(ledgers.values())) == 2, "a seed's runs saw the same samples"
    assert all(row["same_samples"] for row in second["settings"])
    finals = {(row["setting"], row["seed"]): row["final"] for row in second["rows"]}
    pairs = [finals["lr=0.03", seed] - finals["lr=0.01", seed] for seed in (0, 1)]
    assert second["settings"][1]["difference"]["mean"] == pytest.approx(statistics.fmean(pairs))
    assert second["settings"][0]["difference"] is None
    assert json.loads((tmp_path / "swept/results.json").read_text()) == json.loads(json.dumps(second))
    assert (tmp_path / "swept/table.md").read_text() == markdown(second)
    with pytest.raises(UserError, match=r"holds a sweep of another config"):
        sweep(Plan(("lr=0.01",), Config(epochs=7).with_execution(out=out)), said.append, here)


def test_an_interval_is_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx((2.0, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert math.isnan(interval([1.0])[1])
    draw, hits = random.Random(0), 0
    for _ in range(2000):  # it holds the mean in 95 % of cases, with a standard error of 0.5 %
        _, low, high = interval([draw.gauss(0, 1) for _ in range(4)])
        hits += low <= 0 <= high
    assert hits / 2000 == pytest.approx(0.95, abs=0.02)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_what_seeds_have_in_common_falls_out_of_a_paired_difference(noise: list[float]) -> None:
    rows: list[dict[str, Any]] = [
        {"setting": name, "seed": seed, "failed": "", "final": gain + each, "best": 1.0, "ledger_sha256": str(seed)}
        for name, gain in (("a", 0.0), ("b", 0.5))
        for seed, each in enumerate(noise)
    ]
    found = summary(rows)[1]["difference"]
    assert (found["low"], found["high"]) == pytest.approx((0.5, 0.5))
