"""Evaluation on all ranks: every sample once, sums and counts, divided once at the end; scores of each class."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.image_sets import ImageSet, label_sets, table_on
from lockstep.data.loaders import EvalLoader
from lockstep.distributed.files import new_file, write_text
from lockstep.distributed.world import World
from lockstep.errors import UserError, cell
from lockstep.monitoring.journal import ClassesRecord, ClassMeans, Scores
from lockstep.parallel.batchnorm import without_ranks
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.fsdp import is_sharded
from lockstep.parallel.hidden_state import HiddenState, differing, put_back
from lockstep.parallel.module_state import Kept, aligned, eval_mode, preserved_buffers
from lockstep.parallel.strategy import unwrap
from lockstep.randomness import stream
from lockstep.rng.generators import seed_host, seeding
from lockstep.training.precision import autocast
from lockstep.training.step_passes import note_evaluation


@dataclass(frozen=True)
class Metrics:
    """What evaluation found: top1 and top5 as fractions, loss as mean cross-entropy in nats, count in samples.

    Of samples with several labels: one of them is the likeliest class, or among the five likeliest; the loss is the
    binary cross-entropy, its mean over the classes. A sample without a label is right where no class reaches 0.5.
    Of them `map` is the mean average precision; None of samples with one label.
    """

    top1: float
    top5: float
    loss: float
    count: int
    map: float | None = None

    def to_dict(self) -> Scores:
        """Plain values, ready for the journal, which has `map` with the means over classes."""
        return cast(Scores, {name: value for name, value in asdict(self).items() if name != "map"})

    def __str__(self) -> str:
        return self.described(1000)

    def described(self, classes: int) -> str:
        """For people; of five classes or fewer without top-5, which is always right."""
        top5 = f"  top-5 {self.top5:.2%}" if classes > 5 else ""
        ranked = "" if self.map is None else f"mAP {self.map:.2%}  "
        return f"{ranked}top-1 {self.top1:.2%}{top5}  loss {self.loss:.4f}  ({self.count:,} images)"


def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    world: World,
    precision: str = "fp32",
    tick: Callable[[], None] = lambda: None,
    tta: str = "none",
    synchronized: bool = False,
    observe: Callable[[Tensor, Tensor], None] | None = None,
) -> Metrics:
    """Top-1, top-5 and mean loss of `model` over the whole set, the same on every rank and for every number of ranks.

    The bare module runs: the DDP wrapper's forward holds collectives, and a rank whose part is smaller would leave the
    others waiting. Each chunk of the loader gives one row of float64 sums; rows are put together over the ranks and
    added in order. The model is left as it was, but for buffers that differ between ranks, which become their mean.

    Args:
        tick: called before each chunk, so that a long evaluation can show that it is alive.
        tta: "none", "mirror" or "shift", as `averaged` has them.
        synchronized: buffers are the same on all ranks already, as after `sync.synchronize()`: no need to average them.
        observe: called with each of this rank's chunks: logits [b, classes] and labels [b]. Then mAP is the caller's.
    """
    if observe is None and ranks_all(loader.images):
        counts = ClassCounts(loader.images, world.device)
        found = evaluate(model, loader, world, precision, tick, tta, synchronized, counts.add)
        return replace(found, map=counts.scores(loader.images.classes, world).means()["map"])
    world.meet("an evaluation")()
    sets = table_on(loader.images, world.device)
    sums = torch.zeros(loader.chunks, len(fields(Metrics)) - 1, dtype=torch.float64, device=world.device)
    with note_evaluation(unwrap(model), world) as follows:
        for chunk, logits, labels in outputs(model, loader, world, precision, tick, tta, synchronized, follows):
            sums[chunk] = _sums(logits, labels) if sets is None else _sums_of_sets(logits, sets[labels])
            if observe is not None:
                observe(logits, labels)
    # all other ranks hold zeros in a chunk's row, so this sum rounds nothing
    top1, top5, loss, count = world.sum(sums).sum(dim=0).tolist()
    return Metrics(top1 / count, top5 / count, loss / count, int(count))


def outputs(
    model: nn.Module,
    loader: EvalLoader,
    world: World,
    precision: str = "fp32",
    tick: Callable[[], None] = lambda: None,
    tta: str = "none",
    synchronized: bool = False,
    follows: list[str] | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """This rank's chunks: their numbers, logits [b, classes] of float32 or float64, and labels int64 [b].

    The arguments are those of `evaluate`. What predicts goes through here too, so both give the same bits.
    `follows`: gets the name of what a chunk leaves in the model that the next one's logits follow.
    """
    bare, seed = unwrap(model), seeding([world.device])
    context = autocast(precision, world.device)
    average_buffers(bare, 1 if synchronized else world.size)
    # a batch norm that stays in training takes a chunk for a whole batch
    with (
        preserved_buffers(bare.modules()),
        put_back({}, [world.device]),
        eval_mode(bare),
        without_ranks(),
        torch.no_grad(),
    ):
        start, versions = Kept(bare.modules()), [(id(b), b._version) for b in bare.buffers()]

        def taken(chunk: int, images: Tensor) -> Tensor:
            seed(stream(0, "evaluation", chunk))
            seed_host(stream(0, "evaluation", chunk))
            with context():
                return averaged(bare, aligned(images), tta)

        looks = follows is not None and not is_sharded(bare)
        for chunk, images, labels in loader:
            tick()
            before = HiddenState({"": bare}) if looks else None
            logits = taken(chunk, images)
            if before is not None and follows is not None:
                looks, after = False, HiddenState({"": bare})
                own = {name for name, _ in bare.named_buffers()}
                if names := [name for name in differing(before, after) if name not in own]:
                    logits = logits.clone()  # a CUDA graph's next call writes there
                    for some in (images[: len(images) // 2 or 1], images):
                        start.restore()  # no chunk sees what another one leaves in buffers
                        again = taken(chunk, some)
                    after.restore()
                    follows += [] if torch.allclose(logits, again, rtol=1e-4, equal_nan=True) else names[:1]
            if versions != [(id(b), b._version) for b in bare.buffers()]:
                start.restore()  # a chunk must not see which ones its rank took before it
                versions = [(id(b), b._version) for b in bare.buffers()]
            yield chunk, logits.float() if logits.dtype != torch.float64 else logits, labels
        if is_sharded(bare) and loader.short:  # the others' last chunk wants this rank's parts of the weights
            with context():
                averaged(bare, loader.first(), tta)


def averaged(model: nn.Module, images: Tensor, tta: str) -> Tensor:
    """Logits float [b, classes] of images [b, C, H, W], over several views of each where `tta` asks for them.

    "mirror": the mean over the image and its mirror image. "shift": the mean of that and of the same over the image
    moved by one pixel up and left, and down and right, its edges reflected. They are the views of the "level 1" and
    "level 2" test-time augmentation in arXiv:2404.00498, of which its published accuracies use the second.
    """
    if tta == "none":
        return model(images)  # type: ignore[no-any-return]
    # a copy: where the model replays a CUDA graph, its next call writes into the same memory
    mirrored: Tensor = (model(images).clone() + model(images.flip(3))) / 2
    if tta == "mirror":
        return mirrored
    h, w = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
    moved = [averaged(model, padded[:, :, at : at + h, at : at + w], "mirror") for at in (0, 2)]
    return mirrored / 2 + (moved[0] + moved[1]) / 4


def _sums(outputs: Tensor, labels: Tensor) -> Tensor:
    """A batch's sum for each field of `Metrics`: correct at 1, correct at 5, summed loss, count; float64 [4]."""
    try:
        losses = F.cross_entropy(outputs, labels, reduction="none")
    except IndexError as error:
        raise UserError(
            f"the evaluation set has the label {int(labels.max())}, and the model {outputs.shape[1]} outputs: {error}",
            f"Labels run from 0 to {outputs.shape[1] - 1}: mend them, or give the model an output for each class.",
        ) from error
    # the rank of the true class; ties and nan count against the model, so constant or broken outputs score nothing
    score = outputs.gather(1, labels[:, None])
    better = (~(outputs < score)).sum(dim=1) - 1
    return _added(better < 1, better < 5, losses)


def _sums_of_sets(outputs: Tensor, truth: Tensor) -> Tensor:
    """The same of samples with several labels; truth: bool [b, classes]."""
    losses = F.binary_cross_entropy_with_logits(outputs, truth.to(outputs.dtype), reduction="none").mean(1)
    best = outputs.masked_fill(~truth, -torch.inf).amax(dim=1)
    better = (~truth & ~(outputs < best[:, None])).sum(dim=1)  # wrong classes at or above the best right one
    bare, silent = ~truth.any(dim=1), (outputs < 0).all(dim=1)
    return _added(torch.where(bare, silent, better < 1), torch.where(bare, silent, better < 5), losses)


def _added(top1: Tensor, top5: Tensor, losses: Tensor) -> Tensor:
    sums = [top1.sum().to(torch.float64), top5.sum().to(torch.float64), losses.to(torch.float64).sum()]
    return torch.stack([*sums, losses.new_full((), len(losses), dtype=torch.float64)])  # no tensor to wait for


_BINS = 15
_ONE = 1 << 40  # confidences are added as integers of 2^-40: any order gives the same sum
LARGEST_IN_JOURNAL = 100  # classes whose confusion matrix the journal has: some 30 KB an evaluation
_MOST_RANKED = 1 << 27  # images times classes whose average precision is counted: each rank keeps 8 bytes of each
ENDINGS = (".csv", ".json")


def ranks_all(images: ImageSet) -> bool:
    """Whether evaluation finds average precision and thresholds: of several labels a picture, where all fit."""
    sets = label_sets(images)
    return sets is not None and len(images) * len(images.classes) <= _MOST_RANKED


def present(logits: Tensor, thresholds: Sequence[float] = ()) -> Tensor:
    """bool [b, classes]: whose probability reaches its threshold, of logits [b, classes]; without: those above 0.5."""
    if not thresholds:
        return logits > 0
    return logits.double().sigmoid() >= torch.tensor(thresholds, dtype=torch.float64, device=logits.device)


class ClassCounts:
    """Counts over chunks of an evaluation; `add` takes a chunk, `scores` adds up the ranks.

    The confusion matrix takes classes^2 int64 on the device; with more than `largest` classes it is left out, and where
    images have several labels. Of those each class is decided for itself: it is there where its probability is 0.5, or
    reaches its own of the `thresholds`.
    """

    def __init__(
        self, images: ImageSet, device: torch.device, largest: int | None = None, thresholds: Sequence[float] = ()
    ) -> None:
        classes, self.sets = len(images.classes), table_on(images, device)
        size = classes if self.sets is None and (largest is None or classes <= largest) else 0
        self.confusion = torch.zeros(size * size, dtype=torch.int64, device=device)
        self.counts = torch.zeros(3, classes, dtype=torch.int64, device=device)  # images, taken for it, both
        self.bins = torch.zeros(3, _BINS, dtype=torch.int64, device=device)  # images, right ones, confidences
        self.ranks_all, self.thresholds = ranks_all(images), thresholds
        self.seen: list[Tensor] = []  # if so: logits and 0 or 1 for each class, float32 [2, b, classes]

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
        if self.ranks_all:
            self.seen.append(torch.stack([logits.float(), truth.float()]))
        found = present(logits, self.thresholds)
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
        error = sum(gaps) / max(1, sum(images))
        ranked, thresholds = self._ranked(size, world) if self.ranks_all else (None, [0.5] * size)
        found = ByClass(tuple(classes), counts[0], counts[1], counts[2], error, matrix, ranked)
        return found if self.sets is None else replace(found, thresholds=list(self.thresholds) or thresholds)

    def _ranked(self, classes: int, world: World) -> tuple[list[float], list[float]]:
        """Average precision and the threshold of the best F1, of each class over all ranks.

        Equal logits are one threshold, so that no order of samples matters.
        """
        own = torch.cat([self.counts.new_zeros(2, 0, classes).float(), *self.seen], dim=1)
        sizes = world.rows(torch.tensor([own.shape[1]], device=world.device)).flatten().tolist()
        both = own.new_zeros(2, sum(sizes), classes)
        both[:, sum(sizes[: world.rank]) :][:, : own.shape[1]] = own
        found, thresholds = [], []
        for scores, truth in zip(*world.sum(both).cpu().double().transpose(1, 2), strict=True):
            scores, order = scores.sort(descending=True)
            right = truth[order].cumsum(0)
            ends = torch.cat([scores[1:] != scores[:-1], torch.ones(min(1, len(scores)), dtype=torch.bool)])
            precision = (right / torch.arange(1, len(right) + 1))[ends]
            gained = right[ends].diff(prepend=torch.zeros(1))
            found.append(_ratio(float((precision * gained).sum()), float(truth.sum())))
            thresholds.append(_best_threshold(scores[ends], right[ends], ends.nonzero()[:, 0] + 1))
        return found, thresholds


def _best_threshold(scores: Tensor, right: Tensor, taken: Tensor) -> float:
    """The probability from which a class counts as there so that F1 is largest: 0.5 where that is as good as any.

    Else it lies between the last that is taken and the next. 0.5 for a class without samples.

    Args:
        scores: different logits, the largest first, float64 [k].
        right, taken: samples of the class, and samples at all, that have such a logit or a larger one [k].
    """
    if not len(scores) or not right[-1] or not bool(torch.isfinite(scores).all()):
        return 0.5
    f1 = 2 * right / (taken + right[-1])
    below = torch.cat([scores[1:], scores.new_tensor([-torch.inf])])  # the largest that is not taken
    if bool(((f1 == f1.max()) & (below < 0) & (scores > 0)).any()):
        return 0.5
    best = int(f1.argmax())
    return float(((scores[best] + below[best].clamp(min=float(scores[best]) - 1)) / 2).sigmoid())


@dataclass(frozen=True)
class ByClass:
    """Scores by class, as fractions.

    Attributes:
        images, predicted, right: images of each class, images taken for it, and those of which both is true.
        calibration_error: expected calibration error over 15 equal bins (Guo et al., On Calibration of Modern Neural
            Networks, arXiv:1706.04599, equation 3).
        confusion: images of each true class (row) that were taken for each class (column); None: not counted.
        average_precision: where images have several labels, the area below precision over recall; 0 without images.
        thresholds: likewise, the probability from which each class is there: those given, or by the best F1.
    """

    classes: tuple[str, ...]
    images: list[int]
    predicted: list[int]
    right: list[int]
    calibration_error: float
    confusion: list[list[int]] | None
    average_precision: list[float] | None = None
    thresholds: list[float] | None = None

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
        found = ClassMeans(
            macro_precision=precision, macro_recall=recall, macro_f1=f1, calibration_error=self.calibration_error
        )
        if self.average_precision is not None:
            found["map"] = sum(self.average_precision[k] for k in there) / max(1, len(there))
        return found

    def record(self, epoch: int, step: int) -> ClassesRecord:
        """For the journal."""
        found = ClassesRecord(
            kind="classes", epoch=epoch, step=step, classes=list(self.classes), images=self.images,
            predicted=self.predicted, correct=self.right, precision=_short(self.precision), recall=_short(self.recall),
            f1=_short(self.f1),
        )  # fmt: skip
        if self.confusion is not None:
            found["confusion"] = self.confusion
        if self.average_precision is not None:
            found["average_precision"] = _short(self.average_precision)
        if self.thresholds is not None:
            found["thresholds"] = _short(self.thresholds)
        return found

    def __str__(self) -> str:
        means = self.means()
        precision, recall, f1 = means["macro_precision"], means["macro_recall"], means["macro_f1"]
        lowest = sorted((k for k, images in enumerate(self.images) if images), key=lambda k: self.f1[k])[:3]
        names = ", ".join(f"{self.classes[k]} {self.f1[k]:.1%}" for k in lowest)
        ranked = f"mAP {means['map']:.2%}  " if "map" in means else ""
        return (
            f"mean over classes: {ranked}precision {precision:.2%}  recall {recall:.2%}  F1 {f1:.2%} "
            f"(lowest: {names}); calibration error {self.calibration_error:.2%}"
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _short(values: list[float]) -> list[float]:
    return [round(value, 6) for value in values]  # the counts have them in full


def require_ending(path: str) -> None:
    """Raise UserError for a report that no format is known for, or that can't be made where it is named."""
    if path and not path.endswith(ENDINGS):
        raise UserError(f"--report {path}: not a file for a report", f"Its ending says what: {', '.join(ENDINGS)}.")
    if path:
        new_file(path, "--report")


def write_scores(scores: ByClass, path: Path) -> str:
    """Write scores by the file's ending, .csv (a class a row) or .json (all of it); returns a line that says where."""
    names = ["images", "precision", "recall", "f1"]
    names += [name for name in ("average_precision", "thresholds") if getattr(scores, name) is not None]
    if path.suffix == ".csv":
        text = io.StringIO()
        rows = zip(map(cell, scores.classes), *(getattr(scores, name) for name in names), strict=True)
        csv.writer(text).writerows([("class", *names), *rows])
        write_text(path, text.getvalue())
    else:
        names = ["classes", "confusion", "calibration_error", *names]
        write_text(path, json.dumps({name: getattr(scores, name) for name in names}) + "\n")
    return f"{path}: scores of {len(scores.classes)} classes"
