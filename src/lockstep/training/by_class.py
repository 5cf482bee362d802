"""What evaluation found for each class, and how far its confidence can be trusted."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lockstep.data.arrays import ImageSet
from lockstep.data.label_sets import table_on
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write, write_error, write_text
from lockstep.processes.world import World
from lockstep.watch.records import ClassesRecord, ClassMeans

_BINS = 15
_ONE = 1 << 40  # confidences are added as integers of 2^-40: any order gives the same sum
LARGEST_IN_JOURNAL = 100  # classes whose confusion matrix the journal has: some 30 KB an evaluation
ENDINGS = (".csv", ".json", ".png")


class ClassCounts:
    """Counts over chunks of an evaluation; `add` takes a chunk, `scores` adds up the ranks.

    The confusion matrix takes classes^2 int64 on the device; with more than `largest` classes it is left out, and where
    images have several labels. Of those each class is decided for itself: it is there where its probability is 0.5.
    """

    def __init__(self, images: ImageSet, device: torch.device, largest: int | None = None) -> None:
        device = torch.device("cpu") if device.type == "mps" else device  # as `evaluate` hands chunks over
        classes, self.sets = len(images.classes), table_on(images, device)
        size = classes if self.sets is None and (largest is None or classes <= largest) else 0
        self.confusion = torch.zeros(size * size, dtype=torch.int64, device=device)
        self.counts = torch.zeros(3, classes, dtype=torch.int64, device=device)  # images, taken for it, both
        self.bins = torch.zeros(3, _BINS, dtype=torch.int64, device=device)  # images, right ones, confidences

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """logits float [b, classes], labels int64 [b]. Nothing in it waits for the device, as bincount would."""
        if self.sets is not None:
            self._add_sets(logits, self.sets[labels])
            return
        classes = logits.shape[1]
        confidence, predicted = logits.softmax(dim=1).nan_to_num(0.0).max(dim=1)
        right, ones = (predicted == labels).long(), torch.ones_like(labels)
        if len(self.confusion):
            self.confusion.index_add_(0, labels * classes + predicted, ones)
        for row, places, values in zip(self.counts, (labels, predicted, labels), (ones, ones, right), strict=True):
            row.index_add_(0, places, values)
        self._calibrate(confidence, right)

    def _add_sets(self, logits: Tensor, truth: Tensor) -> None:
        found = logits > 0
        self.counts += torch.stack([truth.sum(0), found.sum(0), (truth & found).sum(0)])
        confidence = logits.abs().sigmoid().nan_to_num(0.0).flatten()  # in the decision, there or not
        self._calibrate(confidence, (found == truth).long().flatten())

    def _calibrate(self, confidence: Tensor, right: Tensor) -> None:
        place = (confidence * _BINS).ceil().long().clamp(1, _BINS) - 1  # of (0, 1/15], (1/15, 2/15], ...
        fixed = (confidence.double() * _ONE).round().long()
        for row, values in zip(self.bins, (torch.ones_like(right), right, fixed), strict=True):
            row.index_add_(0, place, values)

    def scores(self, classes: Sequence[str], world: World) -> "ByClass":
        """All ranks call it together."""
        size = len(classes)
        whole = world.sum(torch.cat([self.confusion, self.counts.flatten(), self.bins.flatten()]))
        confusion, rest = whole[: len(self.confusion)], whole[len(self.confusion) :]
        counts, bins = rest[: 3 * size].view(3, size).tolist(), rest[3 * size :].view(3, _BINS).tolist()
        matrix = confusion.view(size, size).tolist() if len(confusion) else None
        images, right, confidence = bins
        gaps = (abs(r - c / _ONE) for r, c in zip(right, confidence, strict=True))
        return ByClass(tuple(classes), counts[0], counts[1], counts[2], sum(gaps) / max(1, sum(images)), matrix)


@dataclass(frozen=True)
class ByClass:
    """Scores by class, as fractions.

    Attributes:
        images, predicted, right: images of each class, images taken for it, and those of which both is true.
        calibration_error: expected calibration error over 15 equal bins (Guo et al., On Calibration of Modern Neural
            Networks, arXiv:1706.04599, equation 3).
        confusion: images of each true class (row) that were taken for each class (column); None: not counted.
    """

    classes: tuple[str, ...]
    images: list[int]
    predicted: list[int]
    right: list[int]
    calibration_error: float
    confusion: list[list[int]] | None

    @cached_property
    def precision(self) -> list[float]:
        """Of what was taken for a class, the part that is; 0 for a class that nothing was taken for."""
        return list(map(_ratio, self.right, self.predicted))

    @cached_property
    def recall(self) -> list[float]:
        """Of a class, the part that was taken for it; 0 for a class without images."""
        return list(map(_ratio, self.right, self.images))

    @cached_property
    def f1(self) -> list[float]:
        """The harmonic mean of the two."""
        return [_ratio(2 * r, p + n) for r, p, n in zip(self.right, self.predicted, self.images, strict=True)]

    def means(self) -> ClassMeans:
        """Over the classes that have images; their recall's is what balanced accuracy means."""
        there = [k for k, images in enumerate(self.images) if images]
        precision, recall, f1 = (
            sum(each[k] for k in there) / max(1, len(there)) for each in (self.precision, self.recall, self.f1)
        )
        return ClassMeans(
            macro_precision=precision, macro_recall=recall, macro_f1=f1, calibration_error=self.calibration_error
        )

    def record(self, epoch: int, step: int) -> ClassesRecord:
        """For the journal."""
        found = ClassesRecord(
            kind="classes", epoch=epoch, step=step, classes=list(self.classes), images=self.images,
            predicted=self.predicted, right=self.right, precision=_short(self.precision), recall=_short(self.recall),
            f1=_short(self.f1),
        )  # fmt: skip
        if self.confusion is not None:
            found["confusion"] = self.confusion
        return found

    def __str__(self) -> str:
        means = self.means()
        precision, recall, f1 = means["macro_precision"], means["macro_recall"], means["macro_f1"]
        lowest = sorted((k for k, images in enumerate(self.images) if images), key=lambda k: self.f1[k])[:3]
        names = ", ".join(f"{self.classes[k]} {self.f1[k]:.1%}" for k in lowest)
        return (
            f"mean over classes: precision {precision:.2%}  recall {recall:.2%}  F1 {f1:.2%} (lowest: {names}); "
            f"calibration error {self.calibration_error:.2%}"
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _short(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]  # the counts have them in full


def require_ending(path: str) -> None:
    """Raise UserError for a report that no format is known for, or that is there already."""
    if path and not path.endswith(ENDINGS):
        raise UserError(f"--report {path}: not a file for a report", f"Its ending says what: {', '.join(ENDINGS)}.")
    if path and Path(path).exists():
        raise UserError(f"{path} exists already", "Name another file with --report, or remove that one.")


def write(scores: ByClass, path: Path) -> None:
    """Write scores by the file's ending: .csv (a class a row), .json (all of it), .png (the confusion matrix).

    Raises:
        UserError: where it can't be written, or matplotlib is missing.
    """
    rows = zip(scores.classes, scores.images, scores.precision, scores.recall, scores.f1, strict=True)
    if path.suffix == ".png" and scores.confusion is None:
        raise UserError(f"{path}: several labels a picture have no confusion matrix", "Name a .csv or .json.")
    if path.suffix == ".png":
        _draw(scores, path)
    elif path.suffix == ".csv":
        text = io.StringIO()
        csv.writer(text).writerows([("class", "images", "precision", "recall", "f1"), *rows])
        write_text(path, text.getvalue())
    else:
        names = ("classes", "confusion", "calibration_error", "images", "precision", "recall", "f1")
        write_text(path, json.dumps({name: getattr(scores, name) for name in names}) + "\n")


def _draw(scores: ByClass, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"{path} needs matplotlib", "pip install 'lockstep-torch[compare]', or name a .csv.") from error
    size, confusion = len(scores.classes), scores.confusion
    assert confusion is not None
    shares = [[_ratio(value, total) for value in row] for row, total in zip(confusion, scores.images, strict=True)]
    figure = Figure(figsize=(max(4.0, 1.8 + 0.42 * size),) * 2, dpi=120 if size <= 40 else 60, layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if size <= 40:
        axes.set_xticks(range(size), scores.classes, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(size), scores.classes)
        for row in range(size):
            for column in (k for k in range(size) if confusion[row][k]):
                colour = "white" if shares[row][column] > 0.5 else "black"
                text = str(confusion[row][column])
                axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    axes.set_xlabel("taken for")
    axes.set_ylabel("class")
    axes.set_title(f"{sum(scores.images):,} images")
    try:
        with atomic_write(path) as temporary:
            figure.savefig(temporary, format="png")
    except OSError as error:
        raise write_error(path, error) from error
