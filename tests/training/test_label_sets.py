"""Several labels a picture: read from tables and tensors, trained, evaluated and used as the definitions have it."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lockstep.checkpoint.card import Card
from lockstep.cli import main
from lockstep.data.label_sets import counts, label_name, numbered
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.training.by_class import ClassCounts, write
from lockstep.training.class_losses import ClassLoss
from lockstep.training.evaluation import evaluate
from lockstep.watch.journal import read

COLOURS = ("blue", "green", "red")


def shapes(root: Path) -> Path:
    """Pictures whose channels are bright or dark, and a table that names the bright ones, or none."""
    generator = np.random.default_rng(0)
    rows = []
    for split, count in (("train", 48), ("val", 17)):
        for k in range(count):
            bright = [colour for bit, colour in enumerate(COLOURS) if k >> bit & 1]
            pixels = generator.integers(0, 60, (9, 9, 3), dtype=np.uint8)
            for colour in bright:
                pixels[:, :, 2 - COLOURS.index(colour)] += 180
            Image.fromarray(pixels).save(root / f"{split}{k}.png")
            rows.append((f"{split}{k}.png", ";".join(bright), split))
    with (root / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    return root / "list.csv"


SEVERAL = "--image-size 8 --model mlp --loss bce --epochs 12 --lr 0.2 --batch-size 16 --device cpu --nproc 1"


def training(root: Path, out: str) -> list[str]:
    dataset = f"table:{root / 'list.csv'}:separator=;"
    return ["train", "--dataset", dataset, *SEVERAL.split(), "--workers", "0", "--out", str(root / out)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("several")
    shapes(root)
    with pytest.raises(SystemExit) as end:
        main(training(root, "run"))
    assert end.value.code == 0
    return root


def test_a_table_with_a_separator_trains_and_evaluates_each_class_for_itself(trained: Path) -> None:
    records = list(read(trained / "run" / "journal.jsonl"))
    last: Any = [record for record in records if record["kind"] == "classes"][-1]
    assert last["classes"] == list(COLOURS)
    assert last["images"] == [8, 8, 8]  # of 0 to 16, those with the bit; 16 has none of the three
    assert "confusion" not in last
    assert last["f1"] == [1.0, 1.0, 1.0]
    best: Any = [record for record in records if record["kind"] == "eval"][-1]
    assert best["top1"] == 1.0  # those without a label among them
    assert Card.read(trained / "run" / "weights" / "final.safetensors").outputs == "sigmoid"


def test_probabilities_are_of_each_class_for_itself(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*line: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*line, "--device", "cpu", "--nproc", "1"])
        out, err = capsys.readouterr()
        assert end.value.code == 0, err
        return out

    found = json.loads(said("predict", str(trained / "run"), str(trained / "val7.png"), "--format", "jsonl"))
    shares = (
        list(found["probabilities"].values()) if isinstance(found["probabilities"], dict) else found["probabilities"]
    )
    assert min(shares) > 0.5  # all three are on it: a softmax has one such at most
    # the same pictures from elsewhere, in another order of classes and with one that the model doesn't know
    rows = [
        ("path", "label"),
        ("val3.png", "green;blue"),
        ("val4.png", "red"),
        ("val5.png", "red;sky"),
        ("val0.png", ""),
    ]
    with (trained / "other.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    text = said("eval", str(trained / "run"), "--data", f"table:{trained / 'other.csv'}:separator=;")
    assert "does not know 1 class(es)" in text
    assert "top-1 100.00%" in text
    assert "(3 images)" in text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--loss", "cross-entropy"], "have several labels each, and --loss cross-entropy takes one"),
        (["--balance", "equal"], "it goes by a picture's class, and those of"),
        (["--class-weights", "auto"], "it goes by a picture's class, and those of"),
    ],
)
def test_what_goes_by_one_class_is_refused(
    trained: Path, flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*training(trained, "refused"), *flags])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


@given(st.lists(st.sets(st.integers(0, 4)), max_size=20))
def test_a_number_means_its_set(sets: list[set[int]]) -> None:
    numbers, table = numbered(sets, 5)
    assert [set(np.flatnonzero(table[number])) for number in numbers] == sets
    assert len(np.unique(table, axis=0)) == len(table)  # no set has two numbers
    again, _ = numbered(sets[::-1], 5)
    assert again[::-1].tolist() == numbers.tolist()  # whatever their order
    images: Any = SimpleNamespace(classes=tuple("abcde"), label_sets=table)
    assert counts(images, numbers).tolist() == [sum(k in each for each in sets) for k in range(5)]
    for number, each in zip(numbers.tolist(), sets, strict=True):
        assert label_name(images, number) == (" + ".join("abcde"[k] for k in sorted(each)) or "none")


@given(st.integers(1, 7), st.integers(1, 30), st.integers(0, 99), st.integers(1, 30))
@settings(deadline=None)
def test_scores_are_those_of_the_definitions_however_the_set_is_cut(classes: int, n: int, seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator)
    truth = torch.rand(n, classes, generator=generator) < 0.3
    numbers, table = numbered([np.flatnonzero(row).tolist() for row in truth.numpy()], classes)
    images: Any = SimpleNamespace(classes=tuple(map(str, range(classes))), label_sets=table)

    class Loader:
        chunks = -(-n // cut)

        def __init__(self) -> None:
            self.images = images

        def __iter__(self) -> Any:
            for chunk in range(self.chunks):
                rows = slice(chunk * cut, (chunk + 1) * cut)
                yield chunk, logits[rows], torch.from_numpy(numbers[rows])

    observed = ClassCounts(images, torch.device("cpu"))
    loader: Any = Loader()
    found = evaluate(torch.nn.Identity(), loader, World.single(), observe=observed.add)
    scores = observed.scores(images.classes, World.single())
    for k, share in ((1, found.top1), (5, found.top5)):
        likeliest = [set(row[:k]) for row in logits.argsort(dim=1, descending=True).tolist()]
        right = [
            bool(likely & set(np.flatnonzero(row))) if row.any() else bool((mine < 0).all())
            for likely, row, mine in zip(likeliest, truth.numpy(), logits, strict=True)
        ]
        assert share == sum(right) / n
    loss = F.binary_cross_entropy_with_logits(logits.double(), truth.double()).item()
    assert found.loss == pytest.approx(loss, rel=1e-5)
    decided = logits > 0
    assert scores.images == truth.sum(0).tolist()
    assert scores.right == (truth & decided).sum(0).tolist()
    assert scores.predicted == decided.sum(0).tolist()
    assert scores.confusion is None
    plain = ClassLoss("bce", sets=torch.from_numpy(table))
    by_number, by_table = (plain(logits, labels) for labels in (torch.from_numpy(numbers), truth.to(torch.float32)))
    assert isinstance(by_number, torch.Tensor)
    assert isinstance(by_table, torch.Tensor)
    assert torch.equal(by_number, by_table)
    assert by_number.item() == pytest.approx(loss, rel=1e-5)


def test_there_is_no_confusion_matrix_to_draw(tmp_path: Path) -> None:
    images: Any = SimpleNamespace(classes=("a", "b"), label_sets=np.eye(2, dtype=bool))
    scores = ClassCounts(images, torch.device("cpu")).scores(images.classes, World.single())
    with pytest.raises(UserError, match="no confusion matrix"):
        write(scores, tmp_path / "report.png")
