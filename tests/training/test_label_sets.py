"""Several labels a picture: read from tables and tensors, trained, evaluated and used as the definitions have it."""

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import lockstep as ls
from lockstep.checkpoint.weights import Card
from lockstep.cli import main
from lockstep.data.image_sets import counts, label_name, numbered, table_on
from lockstep.data.user_sets import user_sets
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring.journal import read
from lockstep.training.evaluation import ClassCounts, evaluate, write_scores
from lockstep.training.losses import ClassLoss
from tests.inprocess import said
from tests.ranks import run_ranks

COLOURS = ("blue", "green", "red")


@dataclass
class Labelled:
    """What evaluation asks of a set."""

    classes: tuple[str, ...]
    label_sets: Any
    size: int

    def __len__(self) -> int:
        return self.size


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


def test_the_thresholds_of_the_best_f1_go_with_the_weights(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained / "run"
    records: list[Any] = [record for record in read(run / "journal.jsonl") if record["kind"] in ("eval", "classes")]
    assert records[-1]["thresholds"] == pytest.approx(Card.read(run / "weights" / "final.safetensors").thresholds)
    assert records[-1]["thresholds"] == [0.5] * 3  # every class is decided right by that
    assert records[-2]["map"] == 1.0
    answers = {}
    onnx = trained / "several.onnx"
    said(capsys, "export", run, "--to", "onnx", "--out", onnx)
    for of in (run, onnx):
        for form in ("table", "csv", "jsonl"):
            words = ("predict", of, trained / "val5.png", trained / "val0.png", "--format", form, "--device", "cpu")
            answers[of, form], _ = said(capsys, *words)
    table, sheet, lines = (answers[run, form] for form in ("table", "csv", "jsonl"))
    assert [line.split("  ")[1] for line in table.splitlines()] == ["blue + red", "none"]
    assert [row["labels"] for row in csv.DictReader(sheet.splitlines())] == ["blue;red", ""]
    assert [json.loads(line)["labels"] for line in lines.splitlines()] == [["blue", "red"], []]
    assert json.loads(answers[onnx, "jsonl"].splitlines()[0])["labels"] == ["blue", "red"]


def test_a_run_is_kept_by_map_where_pictures_have_several_labels(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, *training(trained, "again"), "--epochs", "2", "--keep-best", "map")
    one = ("train", "digits", "--fraction", "0.1", "--epochs", "1", "--nproc", "1", "--keep-best", "map")
    _, refused = said(capsys, *one, "--out", tmp_path / "one", code=2)
    assert "--keep-best map: digits/test has one label a picture" in refused


@given(st.integers(1, 15), st.integers(0, 99), st.booleans())
@example(14, 49, False)
@settings(deadline=None, max_examples=25)
def test_no_other_threshold_has_a_better_f1(n: int, seed: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 3, generator=generator)
    logits = logits.round() if ties else logits
    truth = torch.rand(n, 3, generator=generator) < torch.tensor([0.5, 0.1, 0.0])
    numbers, table = numbered([np.flatnonzero(row).tolist() for row in truth.numpy()], 3)
    images: Any = Labelled(tuple("abc"), table, n)

    def scored(thresholds: Any = ()) -> Any:
        counts_of = ClassCounts(images, torch.device("cpu"), thresholds=thresholds)
        counts_of.add(logits, torch.from_numpy(numbers))
        return counts_of.scores(images.classes, World.single())

    chosen = scored().thresholds
    best, plain = scored(chosen), scored([0.5] * 3)
    assert best.thresholds == chosen
    for k in range(3):
        if not truth[:, k].any():
            assert chosen[k] == 0.5
            continue
        # just below each, as a sigmoid's last bit depends on how many are taken at once
        tried = [0.0, *(logits[:, k].double().sigmoid() - 1e-9).tolist()]
        others = [scored([t if j == k else 0.5 for j in range(3)]).f1[k] for t in tried]
        assert best.f1[k] == max(others)
        assert chosen[k] == 0.5 or best.f1[k] > plain.f1[k] or (logits[:, k] == 0).any()


def in_a_loop(world: World, loss: Any) -> Any:
    """A loop of one's own with labels as BCE wants them; its weights and the types of the labels that it saw."""
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.rand(40, 1, 4, 4, generator=generator), torch.rand(40, 3, generator=generator).round()
    train, val = ls.loaders(((images[:30], targets[:30]), (images[30:], targets[30:])), world, batch_size=8, workers=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).to(world.device)
    spread = ls.parallelize(model, world)
    step = ls.TrainStep(spread, loss, torch.optim.SGD(model.parameters(), lr=0.5))
    for batch in train.epoch(0):
        assert torch.equal(batch.labels, targets[torch.from_numpy(batch.ids)])
        step(batch)
    metrics = ls.evaluate(spread, val, world)
    with torch.no_grad():
        scores = model(images[30:].to(world.device)).cpu()
    assert metrics.map == pytest.approx(mean_average_precision(scores, targets[30:]))
    assert str(metrics).startswith(f"mAP {metrics.map:.2%}  top-1 ")
    return metrics.loss, next(model.parameters()).detach().double().numpy()


def mean_average_precision(scores: torch.Tensor, truth: torch.Tensor) -> float:
    """By definition: over the samples of a class, the share of its samples among those that score as high or higher."""
    found = []
    for own, has in zip(scores.T, truth.T.bool(), strict=True):
        found.append(torch.stack([has[own >= score].double().mean() for score in own[has]]).mean().item())
    return sum(found) / len(found)


def in_loops(world: World) -> list[Any]:
    losses = F.binary_cross_entropy_with_logits, torch.nn.BCEWithLogitsLoss(reduction="none")
    return [in_a_loop(world, loss) for loss in losses]


def test_a_loop_of_ones_own_gets_labels_as_bce_wants_them() -> None:
    alone = in_loops(World.single())
    for rank in run_ranks(in_loops, 2):
        for (found, weights), (expected, its) in zip(rank, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
            np.testing.assert_allclose(weights, its, rtol=1e-5, atol=1e-7)


def test_probabilities_are_of_each_class_for_itself(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, here = trained / "run", ("--device", "cpu", "--nproc", "1")
    line, _ = said(capsys, "predict", run, trained / "val7.png", "--format", "jsonl", *here)
    assert min(json.loads(line)["probabilities"]) > 0.5  # all three are on it: a softmax has one such at most
    # the same pictures from elsewhere, in another order of classes and with one that the model doesn't know
    (trained / "other.csv").write_text("path,label\nval3.png,green;blue\nval4.png,red\nval5.png,red;sky\nval0.png,\n")
    text, _ = said(capsys, "eval", run, "--data", f"table:{trained / 'other.csv'}:separator=;", *here)
    assert "does not know 1 class(es)" in text
    assert "top-1 100.00%" in text
    assert "(3 images)" in text


class Several(Dataset[Any]):
    """Pictures with labels as BCE wants them: float 0 and 1 for each class."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        self.images, self.targets = images, targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[k], self.targets[k]


def test_float_labels_of_tensors_datasets_and_parts_of_them_mean_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.rand(24, 1, 4, 4, generator=generator), torch.rand(24, 3, generator=generator).round()
    pairs = [(images[:16], targets[:16]), (images[16:], targets[16:])]
    whole = Several(images, targets)
    parts = [Subset(whole, range(16)), Subset(whole, range(16, 24))]
    for given_sets in (pairs, [TensorDataset(*each) for each in pairs], [Several(*each) for each in pairs], parts):
        train, val = user_sets("own", given_sets, 0)
        for images_of, rows in ((train, targets[:16]), (val, targets[16:])):
            _, labels = images_of.read(np.arange(len(images_of)), None)
            table = table_on(images_of, "cpu")
            assert table is not None
            assert images_of.classes == ("0", "1", "2")
            assert torch.equal(table[labels], rows.bool())
    moved = Several(images[:16], targets[:16])
    train, _ = user_sets("own", [moved, Several(*pairs[1])], 0)
    moved.targets = 1 - moved.targets + 0.5
    with pytest.raises(UserError, match="sample 3 has other labels than its Dataset states"):
        train.read(np.array([3]), None)
    with pytest.raises(UserError, match="not class numbers"):
        user_sets("own", [Several(e, t * 0.5) for e, t in pairs], 0)


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
    assert sentence in said(capsys, *training(trained, "refused"), *flags, code=2)[1]


@given(st.lists(st.sets(st.integers(0, 4)), max_size=20))
def test_a_number_means_its_set(sets: list[set[int]]) -> None:
    numbers, table = numbered(sets, 5)
    assert [set(np.flatnonzero(table[number])) for number in numbers] == sets
    assert len(np.unique(table, axis=0)) == len(table)  # no set has two numbers
    again, _ = numbered(sets[::-1], 5)
    assert again[::-1].tolist() == numbers.tolist()  # whatever their order
    images: Any = Labelled(tuple("abcde"), table, 0)
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
    images: Any = Labelled(tuple(map(str, range(classes))), table, n)

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


def ranked(world: World, ties: bool) -> Any:
    """Average precision of random logits, of which each rank has seen another part, and by the definition."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(41, 4, generator=generator)
    logits = logits.round() if ties else logits
    truth = torch.rand(41, 4, generator=generator) < torch.tensor([0.5, 0.1, 0.9, 0.0])
    numbers, table = numbered([np.flatnonzero(row).tolist() for row in truth.numpy()], 4)
    images: Any = Labelled(tuple("abcd"), table, 41)
    counts_of = ClassCounts(images, torch.device("cpu"))
    for start in range(world.rank * 7, 41, world.size * 7):
        counts_of.add(logits[start : start + 7], torch.from_numpy(numbers)[start : start + 7])
    wanted = []
    for k in range(4):
        precisions, recalls = [1.0], [0.0]
        for threshold in sorted(set(logits[:, k].tolist()), reverse=True):
            taken = logits[:, k] >= threshold
            precisions.append((taken & truth[:, k]).sum().item() / taken.sum().item())
            recalls.append((taken & truth[:, k]).sum().item() / max(1, truth[:, k].sum().item()))
        steps = zip(precisions[1:], recalls[1:], recalls[:-1], strict=True)
        wanted.append(sum(precision * (after - before) for precision, after, before in steps))
    return counts_of.scores(images.classes, world), wanted


def both(world: World) -> list[Any]:
    return [ranked(world, ties) for ties in (False, True)]


@cache
def of_three_ranks() -> list[Any]:
    return run_ranks(both, 3)


@pytest.mark.parametrize("ties", [False, True])
def test_average_precision_is_that_of_the_definition_on_any_number_of_ranks(ties: bool, tmp_path: Path) -> None:
    (alone, wanted), *several = ranked(World.single(), ties), *(rank[ties] for rank in of_three_ranks())
    assert alone.average_precision == pytest.approx(wanted, abs=1e-12)
    for scores, _ in several:
        assert scores.average_precision == alone.average_precision
    mean = sum(wanted[:3]) / 3  # the fourth class has no picture
    assert f"mAP {mean:.2%}" in str(alone)
    write_scores(alone, tmp_path / "scores.csv")
    write_scores(alone, tmp_path / "scores.json")
    rows = list(csv.DictReader((tmp_path / "scores.csv").read_text(encoding="utf-8").splitlines()))
    assert [float(row["average_precision"]) for row in rows] == alone.average_precision
    assert json.loads((tmp_path / "scores.json").read_text())["average_precision"] == alone.average_precision
    assert alone.record(0, 1)["average_precision"] == pytest.approx(wanted, abs=1e-6)
