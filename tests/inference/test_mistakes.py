"""The most confident mistakes of a run: those that evaluation counts, sorted by confidence, with their pictures."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.config import OptimConfig
from lockstep.distributed.files import write_json
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.inference.find_mistakes import find_mistakes
from lockstep.inference.loading import load
from lockstep.inference.pictures import as_image
from tests.inference import runs


def _run(folder: Path) -> Path:
    runs.leave_a_run(folder)
    write_json(folder / "config.json", replace(runs.config(folder / "data"), seed=3).to_dict())
    return folder


def test_they_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    found = find_mistakes(World.single(), str(folder), "", False, 5)
    classifier, wrong = load(folder), []
    files = sorted((folder / "data/val").rglob("*.png"), key=lambda file: (file.parent.name, file.name))
    for sample, file in enumerate(files):
        (prediction,) = classifier.classify(file, top=1)
        if prediction.classes[0] != file.parent.name:
            wrong.append((-prediction.probabilities[0], sample, file.parent.name, prediction.classes[0]))
    assert (found.images, found.wrong) == (len(files), len(wrong))
    assert 5 < len(wrong) < len(files)
    assert [(m.sample, m.label, m.taken) for m in found.shown] == [tuple(each[1:]) for each in sorted(wrong)[:5]]
    assert [m.confidence for m in found.shown] == pytest.approx([-each[0] for each in sorted(wrong)[:5]], abs=1e-5)
    assert sum(n for _, _, n in found.pairs) == found.wrong
    below = [file.relative_to(folder / "data/val").as_posix() for file in files]
    assert [m.file for m in found.shown] == [below[m.sample] for m in found.shown]
    for mistake in found.shown:
        assert Image.open(io.BytesIO(mistake.picture)).size == (16, 16)


def test_of_several_labels_any_is_right(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    classes, data = sorted(runs.CLASSES), folder / "data"
    rows = [("path", "label", "split")]
    for number, file in enumerate(sorted((data / "val").rglob("*.png"))):
        rows.append((str(file.relative_to(data)), ";".join(classes[4 - number % 5 :]), "val"))
    rows += [(str(file.relative_to(data)), ";".join(classes), "train") for file in (data / "train").rglob("*.png")]
    (data / "list.csv").write_text("\n".join(map(",".join, rows)))
    asked = replace(runs.config(data).data, dataset=f"table:{data / 'list.csv'}:separator=;")
    asked_run = replace(runs.config(data), data=asked, seed=3, optim=OptimConfig(loss="bce"))
    write_json(folder / "config.json", asked_run.to_dict())
    found = find_mistakes(World.single(), str(folder), "", False, 99)
    wrong = []
    for path, labels, split in rows[1:]:
        classifier = load(folder)
        logits = classifier(classifier.transform(data / path)[None])[0]
        said = classifier.card.classes[int(logits.argmax())]
        if split == "val" and (said not in labels.split(";") if labels else bool(logits.max() > 0)):
            wrong.append(path)
    assert sorted(m.file for m in found.shown) == sorted(wrong)
    assert len(wrong) == found.wrong > 2
    assert {m.label for m in found.shown} <= {" + ".join(classes[k:]) or "none" for k in range(5)}


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = _run(tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        find_mistakes(World.single(), str(folder), str(tmp_path / "nowhere"), False, 5)
    (folder / "weights/best.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        find_mistakes(World.single(), str(folder), "", False, 5)
    config = runs.config(folder / "data")
    write_json(folder / "config.json", replace(config, data=replace(config.data, dataset="os:getcwd")).to_dict())
    with pytest.raises(UserError, match="names code"):
        find_mistakes(World.single(), str(folder), "", False, 5)
    write_json(folder / "config.json", replace(config, data=replace(config.data, dataset="mnist")).to_dict())
    with pytest.raises(UserError, match="mnist is not in"):  # and nothing is asked of the network
        find_mistakes(World.single(), str(folder), str(tmp_path / "nowhere"), False, 5)


def test_pixels_of_any_kind_are_drawn() -> None:
    grey = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    assert np.array(as_image(grey)).tolist() == [[[0, 0, 0], [255, 255, 255]]]
    four = torch.arange(8, dtype=torch.uint8).reshape(4, 1, 2)
    assert np.array(as_image(four)).tolist() == [[[0, 2, 4], [1, 3, 5]]]
    floats = torch.tensor([[[-1.0, 1.0]]])
    assert np.array(as_image(floats)).tolist() == [[[0, 0, 0], [255, 255, 255]]]
