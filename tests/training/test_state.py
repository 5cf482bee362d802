"""A run's progress from a file that anybody may have changed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands import evaluate
from lockstep.config import Config, ModelConfig
from lockstep.errors import UserError
from lockstep.training.evaluation import Metrics
from lockstep.training.state import State, require_whole


def state() -> State:
    made = State(
        epochs=1, metrics=Metrics(0.5, 0.75, 1.25, 360), best=0.5, best_step=2, goal=0.25, waited=1, skipped=[1]
    )
    for trained in (True, False, True):
        made.advance(np.arange(4), trained)
    return made


def test_there_and_back() -> None:
    for made in (State(), state()):
        assert State.from_dict(json.loads(json.dumps(made.to_dict())), per_epoch=2) == made


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", -1), ("steps", "3"), ("steps", 1.5), ("steps", True), ("steps", 2**80), ("samples", None),
        ("epochs", 2), ("epochs", 0), ("best_step", 4), ("best", 2), ("best", "0.5"), ("best", float("nan")),
        ("waited", -1),
        ("ledger", "00"), ("ledger", 7), ("ledger", "zz" * 32), ("skipped", 3), ("skipped", [-1]), ("skipped", ["1"]),
        ("metrics", {}), ("metrics", []), ("metrics", {"top1": 2, "top5": 1, "loss": 0, "count": 1}), ("extra", 1),
    ],
)  # fmt: skip
def test_what_no_run_has_written_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=r"state\.json holds what no run has written"):
        State.from_dict({**state().to_dict(), name: value}, per_epoch=2)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(plain, lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=5), x, max_size=2))


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from([*State().to_dict(), "more"]), value=values, missing=st.booleans())
def test_a_forged_entry_is_refused_or_as_good_as_any(name: str, value: Any, missing: bool) -> None:
    forged = {**state().to_dict(), name: value}
    if missing:
        del forged[name]
    try:
        made = State.from_dict(forged, per_epoch=2)
    except UserError:
        return
    made.advance(np.arange(2))
    assert json.loads(json.dumps(made.to_dict()))["steps"] == made.steps


def test_code_that_a_folder_names_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), model=ModelConfig(model="os:system"))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(UserError, match="names code that this would run: model os:system") as told:
        evaluate.main([str(tmp_path), "--nproc", "1"])
    assert "--trust-code" in told.value.remedy


@pytest.mark.parametrize("name", ["execution", "selection", "optim"])
def test_a_config_whose_parts_are_none_is_refused(name: str) -> None:
    saved = {"config": Config().to_dict(), "data": "", "rounding": {}, "progress": State().to_dict()}
    require_whole(saved)
    require_whole({**saved, "config": {}})  # an older one may lack what came later
    with pytest.raises(UserError, match=r"no run has written \(config\)"):
        require_whole({**saved, "config": {**Config().to_dict(), name: 3}})
