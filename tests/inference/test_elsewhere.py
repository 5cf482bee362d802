"""lockstep eval RUN --data OTHER: pictures from elsewhere, classes matched by name."""

import csv
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import Card
from lockstep.config import Config, DataConfig, ModelConfig
from lockstep.data.sources import load, to_evaluate
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.inference.classifier import predictions
from lockstep.inference.elsewhere import Matched, matched, scored
from lockstep.inference.loading import load as load_classifier
from lockstep.inference.pictures import find
from lockstep.training.assemble import build_model, eval_loader
from lockstep.training.evaluation import ByClass, Metrics, evaluate
from tests.data.formats import folder_sets
from tests.inference.runs import CLASSES, config, leave_a_run
from tests.inprocess import said
from tests.ranks import run_ranks

ALONE = World.single()


def looked_at(run: Path, data: str, world: World = ALONE, **how: Any) -> tuple[Metrics, ByClass, list[str], Matched]:
    classifier = load_classifier(run)
    other = to_evaluate(data, how.get("data_dir", ""), classifier.card.shape[1], how.get("follow_links", False), world)
    images, notes = matched(other, classifier.card)
    return *scored(classifier, images, world), notes, images


def test_the_runs_own_pictures_have_the_scores_that_evaluation_gave(tmp_path: Path) -> None:
    run = leave_a_run(tmp_path)
    _, val = folder_sets(run / "data", 16)
    asked = config(run / "data")
    model = load_classifier(run).model
    expected = evaluate(model, eval_loader(asked, val, ALONE), ALONE)
    metrics, scores, notes, images = looked_at(run, str(run / "data"))
    assert metrics == expected
    assert (notes, images.name) == ([], str(run / "data/val"))
    assert sum(scores.images) == len(val)
    answers = predictions(load_classifier(run), find([str(run / "data/val")]), ALONE, top=1)
    right = [Path(answer.path).parent.name == answer.prediction.classes[0] for answer in answers]
    assert metrics.top1 == np.mean(right)


def plain(world: World, run: str, data: str) -> Any:
    metrics, scores, notes, _ = looked_at(Path(run), data, world)
    return metrics.to_dict(), scores.images, scores.right, scores.confusion, scores.calibration_error, notes


def test_classes_are_matched_by_their_names_on_any_number_of_ranks(tmp_path: Path) -> None:
    run, other = leave_a_run(tmp_path / "run"), tmp_path / "other"
    other.mkdir()
    for theirs, ours in (("c", "c"), ("yak", "bee"), ("bee", "bee"), ("zebra", "ant")):  # other places, too
        shutil.copytree(run / "data/val" / ours, other / theirs)
    metrics, scores, notes, _ = looked_at(run, str(other))
    assert notes == [
        f"note: the model does not know 2 class(es) of {other}, whose 6 images are left out: yak, zebra",
        f"note: {other} has no image of 2 of the model's 4 classes: ant, c-d",
    ]
    whole = looked_at(run, str(run / "data"))[1]
    places = [whole.classes.index(name) for name in ("bee", "c")]
    assert metrics.count == 6
    assert whole.confusion is not None
    assert scores.confusion is not None
    for place in range(len(CLASSES)):
        assert scores.confusion[place] == (whole.confusion[place] if place in places else [0] * len(CLASSES))
    alone = plain(ALONE, str(run), str(other))
    assert alone[1:4] == (scores.images, scores.right, scores.confusion)
    assert run_ranks(plain, 3, str(run), str(other), timeout=240) == [alone] * 3
    (tmp_path / "strange").mkdir()
    shutil.copytree(run / "data/val/ant", tmp_path / "strange/cat")
    with pytest.raises(UserError, match="no class in common: there cat; here") as caught:
        looked_at(run, str(tmp_path / "strange"))
    assert "matched by their names" in caught.value.remedy


def test_a_name_in_either_of_unicodes_forms_is_one_class(tmp_path: Path) -> None:
    """Weights of before hold names as their folders had them: macOS writes an accent as a character of its own."""
    run = leave_a_run(tmp_path)
    card = replace(load_classifier(run).card, classes=tuple(unicodedata.normalize("NFD", name) for name in ("é", "ü")))
    for name in (unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "ü")):
        shutil.copytree(run / "data/val/ant", tmp_path / "other" / name)
    images, notes = matched(to_evaluate(str(tmp_path / "other"), "", 16, False, ALONE), card)
    assert (len(images), sorted(set(images.labels)), notes) == (6, [0, 1], [])


def test_a_table_is_evaluated_by_its_rows_to_validate_on(tmp_path: Path) -> None:
    run = leave_a_run(tmp_path)
    rows = [(f"{part}/{name}/{k}.png", name, part) for part in ("train", "val") for name in CLASSES for k in range(3)]
    with (run / "data/list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    folder = looked_at(run, str(run / "data"))
    for data in (str(run / "data/list.csv"), f"table:{run / 'data/list.csv'}"):
        assert looked_at(run, data)[:2] == folder[:2]
    assert looked_at(run, "folder", data_dir=str(run / "data"))[:2] == folder[:2]


def test_pictures_of_another_size_and_colour_are_fitted(tmp_path: Path) -> None:
    """A run on grey 8x8 digits takes folders and arrays of other shapes."""
    digits, _ = load(DataConfig(), tmp_path, 0, ALONE)
    asked = Config(model=ModelConfig(model="digits_net"))
    (tmp_path / "weights").mkdir()
    weights.save(
        build_model(asked, digits), tmp_path / "weights/best.safetensors", Card.of(asked, digits).to_metadata()
    )
    metrics, *_ = looked_at(tmp_path, "digits")
    expected = evaluate(
        load_classifier(tmp_path).model, eval_loader(asked, load(DataConfig(), tmp_path, 0, ALONE)[1], ALONE), ALONE
    )
    assert metrics.count == expected.count == 360
    assert metrics.top1 == expected.top1
    run = leave_a_run(tmp_path / "run")
    for name, number in (("ant", 1), ("bee", 2)):
        shutil.copytree(run / "data/val" / name, tmp_path / "colour" / str(number))
    metrics, *_, images = looked_at(tmp_path, str(tmp_path / "colour"))
    assert metrics.count == 6
    assert images.read(np.arange(2), None)[0].shape == (2, 1, 8, 8)
    card = Card.of(asked, digits)
    own = Matched(card=card, name="", fingerprint="", other=digits, samples=np.arange(3), labels=np.arange(3))
    assert torch.equal(own.read(np.arange(3), None)[0], digits.read(np.arange(3), None)[0])


def test_what_can_not_be_evaluated_is_named(tmp_path: Path) -> None:
    run = leave_a_run(tmp_path)
    with pytest.raises(UserError, match="there is no such folder, table or data set"):
        looked_at(run, str(tmp_path / "nowhere"))
    broken = run / "data/val/ant/1.png"
    broken.write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"ant/1.png \(sample 1\) cannot be read as an image"):
        looked_at(run, str(run / "data"))
    broken.unlink()
    shutil.copy(run / "data/val/ant/0.png", tmp_path / "elsewhere.png")
    broken.symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(UserError, match="is a link to"):
        looked_at(run, str(run / "data"))
    assert looked_at(run, str(run / "data"), follow_links=True)[0].count == 12


def test_the_command_prints_it_and_trusts_no_code_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, report = leave_a_run(tmp_path), tmp_path / "report.json"
    file, alone = run / "weights/best.safetensors", ("--workers", "0", "--nproc", "1", "--device", "cpu")
    out, _ = said(capsys, "eval", file, "--data", run / "data", "--report", report, *alone)
    assert f"on {run}/data/val: top-1" in out
    assert report.is_file()
    refused = said(capsys, "eval", file, "--data", "own:sets", code=2)[1]
    assert "--data own:sets is code that this would run" in refused
    assert "is a file, which does not say where its data is" in said(capsys, "eval", file, code=2)[1]
