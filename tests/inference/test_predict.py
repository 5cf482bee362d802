"""A trained model on new pictures: the bits of evaluation, on any number of ranks, from nothing but its file."""

import csv
import io
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.transforms import v2

import lockstep as ls
from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import Card
from lockstep.data.sources import load
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.inference.classifier import likeliest, predictions
from lockstep.inference.pictures import find, fitted
from lockstep.training.assemble import eval_loader
from lockstep.training.evaluation import outputs
from tests.data.formats import folder_sets
from tests.data.photos import photo, turned
from tests.inference.runs import CHUNK, CLASSES, config, leave_a_run
from tests.inprocess import said
from tests.ranks import run_ranks

SINGLE = World.single()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_a_run(tmp_path_factory.mktemp("run"))


def asked_and_evaluated(world: World, run: Path) -> tuple[list[str], list[Any], list[Any]]:
    """Paths with prediction, and the probabilities that evaluation computes, this rank's rows of all."""
    classifier: ls.Classifier = ls.load(run)
    files = find([str(run / "data" / "val")])
    answers = predictions(classifier, files, world, top=2)
    asked = config(run / "data")
    _, val = folder_sets(run / "data", 16)
    table = torch.zeros(len(val), 2)
    for chunk, logits, _ in outputs(classifier.model, eval_loader(asked, val, world), world, synchronized=True):
        table[chunk * CHUNK :][: len(logits)] = likeliest(logits, 2)[0]
    return list(files), [answer.prediction for answer in answers], world.sum(table).tolist()


def test_probabilities_are_evaluations_bit_for_bit_on_any_number_of_ranks(trained: Path) -> None:
    files, alone, evaluated = asked_and_evaluated(SINGLE, trained)
    assert [list(p.probabilities) for p in alone] == evaluated
    assert [Path(file).parent.name for file in files] == sorted(CLASSES * 3)
    assert run_ranks(asked_and_evaluated, 3, trained) == [(files, alone, evaluated)] * 3


def test_pictures_are_turned_and_shrunk_as_evaluation_does(trained: Path, tmp_path: Path) -> None:
    classifier = ls.load(trained)
    classifier.card = replace(classifier.card, decode_size=17)
    for number in range(6):
        for split in ("train", "val"):
            file = tmp_path / split / "c" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            photo(150 - number, 90 + 2 * number).save(file, exif=turned(1 + number))
    files = find([str(tmp_path / "val")])
    found = predictions(classifier, files, SINGLE, top=4)
    asked = config(tmp_path, decode_size=17)
    _, val = load(asked.data, tmp_path, 0, SINGLE)
    for chunk, logits, _ in outputs(classifier.model, eval_loader(asked, val, SINGLE), SINGLE, synchronized=True):
        for answer, values in zip(found[chunk * CHUNK :], likeliest(logits, 4)[0].tolist(), strict=False):
            assert answer.prediction.probabilities == tuple(values)
    assert [classifier.classify(Image.open(file), top=4)[0] for file in files[:1]] == [
        classifier.classify(file, top=4)[0] for file in files[:1]
    ]
    assert not torch.equal(classifier.transform(files[0]), ls.load(trained).transform(files[0]))


def test_a_broken_file_is_named_and_changes_no_other_answer(trained: Path, tmp_path: Path) -> None:
    whole = find([str(trained / "data" / "val" / "ant")])
    torn, text = tmp_path / "torn.png", tmp_path / "text.jpg"
    torn.write_bytes(Path(whole[1]).read_bytes()[:90])
    text.write_text("no picture")
    classifier = ls.load(trained)
    found = predictions(classifier, [whole[0], str(torn), str(text), whole[2]], SINGLE)
    right = predictions(classifier, [whole[0], whole[1], whole[1], whole[2]], SINGLE)
    assert [bool(answer.error) for answer in found] == [False, True, True, False]
    assert str(torn) in found[1].error
    assert str(text) in found[2].error
    assert (found[0], found[3]) == (right[0], right[3])


def test_a_loaded_run_prepares_pictures_as_torchvision_does(trained: Path) -> None:
    classifier = ls.load(trained / "weights" / "best.safetensors")
    card = classifier.card
    theirs = v2.Compose(
        [
            v2.Resize(round(16 / card.crop_pct), antialias=True),
            v2.CenterCrop(16),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(card.mean, card.std),
        ]
    )
    path = find([str(trained / "data" / "val" / "bee")])[1]
    image = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
    for picture in (path, Image.open(path), image):
        torch.testing.assert_close(classifier.transform(picture), theirs(image), rtol=0, atol=1e-5)
    (only,) = classifier.classify(path, top=9)
    assert len(only.classes) == len(CLASSES)
    assert sum(only.probabilities) == pytest.approx(1)
    assert not classifier.training


def test_grey_pictures_of_the_stored_size_pass_untouched() -> None:
    card = Card("mlp", ("a", "b"), (1, 28, 28), 0, 1.0, (0.5,), (0.5,), "fp32", "none", 4, "mnist")
    pixels = np.random.default_rng(1).integers(0, 256, (28, 28), dtype=np.uint8)
    assert torch.equal(fitted(Image.fromarray(pixels), card)[0], torch.from_numpy(pixels))
    colour = Image.fromarray(np.random.default_rng(2).integers(0, 256, (28, 28, 3), dtype=np.uint8))
    assert torch.equal(fitted(colour, card)[0], torch.from_numpy(np.array(colour.convert("L"))))


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
cards = st.integers(1, 4).flatmap(
    lambda channels: st.builds(
        Card,
        model=names,
        classes=st.lists(names, max_size=4).map(tuple),
        shape=st.tuples(st.just(channels), st.integers(1, 999), st.integers(1, 999)),
        image_size=st.integers(0, 999),
        crop_pct=st.floats(0.01, 1),
        mean=st.tuples(*[st.floats(-1, 1)] * channels),
        std=st.tuples(*[st.floats(0.01, 1)] * channels),
        precision=st.sampled_from(["fp32", "bf16"]),
        tta=st.sampled_from(["none", "shift"]),
        eval_batch_size=st.integers(1, 999),
        dataset=names,
        decode_size=st.integers(0, 999),
    )
)


@given(cards, st.sampled_from(list(Card.__dataclass_fields__)), st.sampled_from(["", "[", "null", "[1]", "-1", "NaN"]))
def test_a_card_comes_back_and_a_damaged_one_is_refused_or_reads_as_something_sound(
    card: Card, field: str, damage: str
) -> None:
    note = card.to_metadata()
    assert Card.from_metadata(note, "here") == card
    without = {key: value for key, value in note.items() if key != field}
    if field == "thresholds":  # files of before have none
        assert Card.from_metadata(without, "here") == card
    else:
        with pytest.raises(UserError, match=f"here does not say what model it is for: {field}"):
            Card.from_metadata(without, "here")
    with suppress(UserError):  # what has another type, or can't be
        assert Card.from_metadata(note | {field: damage}, "here").side > 0


def test_the_command_writes_tables_csv_and_json_and_sorts(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG")
    asked = (str(trained), str(trained / "data" / "val" / "ant"), str(bad))

    def predict(*words: object) -> tuple[str, str]:
        """Code 2 is for the picture that can't be read; all others are answered."""
        return said(capsys, "predict", *words, "--nproc", "1", "--device", "cpu", code=2)

    table, err = predict(*asked, "--top", "1", "--sort-into", str(tmp_path / "sorted"))
    lines = table.splitlines()
    assert len(lines) == 4
    assert lines[0].split()[1] in CLASSES
    assert "can't be read as an image" in lines[3]
    assert f"1 of 4 pictures could not be read, as {bad}" in err
    copies = sorted(path.relative_to(tmp_path / "sorted") for path in (tmp_path / "sorted").rglob("*.png"))
    assert [path.name for path in sorted(copies, key=lambda p: p.name)] == ["0.png", "1.png", "2.png"]
    assert {path.parent.name for path in copies} <= set(CLASSES)
    rows = list(csv.DictReader(io.StringIO(predict(*asked, "--format", "csv", "--top", "2")[0])))
    objects = [json.loads(line) for line in predict(*asked, "--format", "jsonl", "--top", "2")[0].splitlines()]
    for row, found, line in zip(rows, objects, lines, strict=True):
        assert row["path"] == found["path"]
        assert line.startswith(row["path"])
        if "error" in found:
            assert row["error"] == found["error"]
            assert row["class"] == ""
        else:
            assert [row["class"], row["class_2"]] == found["classes"]
            assert [float(row["probability"]), float(row["probability_2"])] == found["probabilities"]
            assert line.split()[1] == row["class"]
    file = tmp_path / "answers.csv"
    assert predict(*asked, "--format", "csv", "--top", "2", "--file", str(file))[0] == ""
    assert list(csv.DictReader(io.StringIO(file.read_text()))) == rows


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{run}"], "predict needs a run and pictures"),
        (["{run}", "nothing.png"], "there is no picture or folder nothing.png"),
        (["{run}", "{empty}"], "holds no image"),
        (["{empty}", "{run}"], "no weights at"),
        (["{run}/weights/best.safetensors", "{run}/data", "--top", "0"], "--top 0 is too small"),
        (["{run}", "{run}/data", "--file", "{run}/weights/best.safetensors"], "exists already"),
        (["{run}", "{run}/data", "--file", "{run}/no/answers.csv"], "there is no folder {run}/no to write"),
        (["{run}", "{run}/data", "--sort-into", "{run}/weights/best.safetensors"], "best.safetensors is no folder"),
        (["{code}", "{run}/data"], "names code that this would run: model os:getcwd"),
        (["{bare}", "{run}/data"], "does not say what model it is for: model, classes"),
        (["{half}", "{run}/data"], "half.safetensors is damaged or not a safetensors file"),
    ],
)
def test_what_can_not_be_answered_is_refused_in_a_sentence(
    arguments: list[str], sentence: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    source = trained / "weights" / "best.safetensors"
    tensors, note = load_file(source), weights.read_metadata(source)
    save_file(tensors, tmp_path / "code.safetensors", note | {"model": "os:getcwd"})
    save_file(tensors, tmp_path / "bare.safetensors")
    places = {"run": trained, "empty": tmp_path / "empty"}
    (tmp_path / "half.safetensors").write_bytes(source.read_bytes()[:999])
    places |= {name: tmp_path / f"{name}.safetensors" for name in ("code", "bare", "half")}
    _, err = said(capsys, "predict", *(argument.format(**places) for argument in arguments), code=2)
    assert sentence.format(**places) in err


def test_equal_probabilities_come_in_the_order_of_the_classes() -> None:
    values, indices = likeliest(torch.tensor([[0.0, 2.0, 2.0, 0.0]]), 3)
    assert indices.tolist() == [[1, 2, 0]]
    assert values[0, 0] == values[0, 1]
