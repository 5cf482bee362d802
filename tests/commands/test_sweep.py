"""Sweeps: which runs there are, that they go on, and the table's pairs."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands.measuring import NotMeasured, Row
from lockstep.commands.sweep import Plan, explanations, folder_of, summary, sweep
from lockstep.config import Config, DataConfig, Execution, ModelConfig, OptimConfig
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring.journal import Record, read
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
    return Plan(vary, BASE.with_execution(out=out))


def test_every_combination_is_a_run_that_differs_in_those_flags_alone() -> None:
    made = plan("learning-rate=0.1,0.2", "flip=true,false", "seed=3,4").runs()
    assert list(made) == [f"lr={lr} flip={flip}" for lr in ("0.1", "0.2") for flip in ("true", "false")]
    for setting, configs in made.items():
        assert list(configs) == [3, 4]
        for seed, each in configs.items():
            config, plain = each.to_dict(), BASE.to_dict()
            lr, flip = setting.split()
            assert config["optim"].pop("lr") == float(lr.removeprefix("lr="))
            assert config["data"].pop("flip") is (flip == "flip=true")
            assert config.pop("seed") == seed
            del plain["optim"]["lr"], plain["data"]["flip"], plain["seed"]
            assert config == plain
    assert plan("seed=1").runs()[""][1].seed == 1
    assert folder_of("", 1) == "seed=1"
    assert folder_of("model=a.b:c wd=1", 2) == "model=a.b_c_wd=1_seed=2"


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (("lrr=0.1",), "unknown flag in --vary 'lrr'\n  Did you mean lr"),
        (("out=a,b",), "unknown flag in --vary 'out'"),
        (("0.1",), "--vary 0.1 is not a name and values"),
        (("lr=",), "--vary lr= is not a name and values"),
        (("lr=0.1,0.1",), "--vary lr: something is there twice"),
        (("lr=0.1", "learning-rate=0.2"), "--vary lr: something is there twice"),
        (("lr=fast",), "not a number"),
        (("flip=maybe",), "--vary flip=maybe"),
        (("lr=-1",), "--lr -1.0 is too small"),
        ((), "nothing varies"),
    ],
)
def test_refusals(vary: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*vary).runs()
    assert message in str(caught.value)


def test_runs_share_their_draws_and_what_is_missing_is_run(tmp_path: Path) -> None:
    out, ran = str(tmp_path / "swept"), list[str]()

    def here(place: Path, config: Config) -> list[Record]:
        journal = place / "journal.jsonl"
        if not journal.exists():
            ran.append(place.name)
            if place.name == "lr=0.03_seed=1" and len(ran) < 5:
                raise NotMeasured("no space left")
            (place / "weights").mkdir(parents=True)
            train(config, World.single(), place)
        return read(journal)

    said = list[str]()
    first = sweep(plan("lr=0.01,0.03", "seed=0,1", out=out), said.append, here)
    assert ran == ["lr=0.01_seed=0", "lr=0.03_seed=0", "lr=0.03_seed=1", "lr=0.01_seed=1"]
    assert [row["failed"] for row in first["rows"]] == ["", "", "", "no space left"]
    assert "lr=0.03, seed 1 failed: no space left" in said
    assert "lr=0.03: 1 run(s) failed" in explanations(first)
    second = sweep(plan("lr=0.01,0.03,0.05", "seed=0,1", out=out), said.append, here)
    assert ran[4:] == ["lr=0.05_seed=0", "lr=0.05_seed=1", "lr=0.03_seed=1"], "what is there is not run again"
    ledgers = {(row["setting"], row["seed"]): row["ledger_sha256"] for row in second["rows"]}
    assert len(ledgers) == 6
    assert len(set(ledgers.values())) == 2, "a seed's runs saw the same samples"
    assert all(row["same_samples"] for row in second["settings"])
    finals = {(row["setting"], row["seed"]): row["final"] for row in second["rows"]}
    pairs = [finals["lr=0.03", seed] - finals["lr=0.01", seed] for seed in (0, 1)]
    assert second["settings"][1]["difference"]["mean"] == pytest.approx(statistics.fmean(pairs))
    assert second["settings"][0]["difference"] is None
    assert json.loads((tmp_path / "swept/results.json").read_text()) == json.loads(json.dumps(second))
    with pytest.raises(UserError, match=r"conditions.*\n    config\.epochs: "):
        sweep(Plan(("lr=0.01",), Config(epochs=7).with_execution(out=out)), said.append, here)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9))
def test_what_seeds_have_in_common_falls_out_of_a_paired_difference(noise: list[float]) -> None:
    def run(seed: int, final: float, ledger: str) -> dict[str, Any]:
        return {"seed": seed, "failed": "", "final": final, "best": 1.0, "ledger_sha256": ledger}

    rows = [
        Row(name, BASE, "", {k: run(k, gain + each, ledger) for k, each in enumerate(noise)})
        for name, gain, ledger in (("a", 0.0, "x"), ("b", 0.5, "y"))
    ]
    first, second = summary(rows)
    assert (second["difference"]["low"], second["difference"]["high"]) == pytest.approx((0.5, 0.5))
    assert (first["same_samples"], second["same_samples"]) == (True, False)
    assert explanations({"settings": [first, second]})[-1] == "b: in other batches than the first"
