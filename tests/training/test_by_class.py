"""Scores by class: those of the definitions, and the same numbers on any number of ranks."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.execution import Evaluation
from lockstep.distributed.files import write_text
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.evaluation import ByClass, ClassCounts, require_ending
from lockstep.training.run_folder import evaluate_run, read_config
from tests.inference.runs import CLASSES, config, leave_a_run
from tests.inprocess import said
from tests.ranks import run_ranks
from tests.training.test_label_sets import Labelled

SINGLE = World.single()


def scores_of(logits: torch.Tensor, labels: torch.Tensor, cut: int, sets: Any = None) -> ByClass:
    names = tuple(f"c{k}" for k in range(logits.shape[1]))
    images: Any = Labelled(names, sets, 0)
    counts = ClassCounts(images, logits.device)
    for start in range(0, len(labels), cut):
        counts.add(logits[start : start + cut], labels[start : start + cut])
    return counts.scores(names, SINGLE)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99), st.integers(1, 40))
@settings(deadline=None)
def test_they_are_those_of_the_definitions_however_the_set_is_cut(classes: int, n: int, seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator)
    labels = torch.randint(0, classes, (n,), generator=generator)
    found = scores_of(logits, labels, cut)
    assert found == scores_of(logits, labels, n)
    predicted, confidence = logits.argmax(1), logits.softmax(1).amax(1).double()
    for k in range(classes):
        hits = int(((predicted == k) & (labels == k)).sum())
        taken, of_it = int((predicted == k).sum()), int((labels == k).sum())
        assert found.precision[k] == (hits / taken if taken else 0)
        assert found.recall[k] == (hits / of_it if of_it else 0)
        assert found.f1[k] == pytest.approx(2 * hits / (taken + of_it) if hits else 0)
    error = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            gap = (predicted[inside] == labels[inside]).double().mean() - confidence[inside].mean()
            error += float(inside.double().mean() * gap.abs())
    assert found.calibration_error == pytest.approx(error, abs=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = leave_a_run(tmp_path_factory.mktemp("run"))
    write_text(run / "config.json", json.dumps(config(run / "data").to_dict()))
    return run


def reported(world: World, run: Path, file: Path) -> None:
    asked = read_config(str(run), trust_code=False)
    evaluate_run(world, asked, str(run), Evaluation(report=str(file), execution=asked.execution))


def test_the_command_writes_the_same_report_on_any_number_of_ranks(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts: dict[str, Any] = {}
    for ending in ("csv", "json"):
        file = tmp_path / f"report.{ending}"
        here = ("--nproc", "1", "--device", "cpu", "--workers", "0", "--data-dir", trained / "data")
        out, _ = said(capsys, "eval", trained, "--report", file, *here)
        assert f"{file}: scores of 4 classes\n" in out
        texts[ending] = file.read_bytes()
    run_ranks(reported, 3, trained, tmp_path / "three.json")
    assert (tmp_path / "three.json").read_bytes() == texts["json"]
    whole = json.loads(texts["json"])
    rows = list(csv.DictReader(io.StringIO(texts["csv"].decode())))
    assert [row["class"] for row in rows] == whole["classes"] == sorted(CLASSES)
    assert [float(row["f1"]) for row in rows] == whole["f1"]
    assert [sum(row) for row in whole["confusion"]] == whole["images"] == [3] * 4


@pytest.mark.parametrize(("name", "sentence"), [("a.txt", "not a file for a report"), ("there.csv", "exists already")])
def test_a_report_that_can_not_be_is_refused_at_once(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.csv").touch()
    with pytest.raises(UserError, match=sentence):
        require_ending(name)
