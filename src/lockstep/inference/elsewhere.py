"""`lockstep eval RUN --data OTHER`: a trained model on labelled pictures from elsewhere, classes matched by name."""

from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint.weights import Card, listed
from lockstep.data.image_sets import Array, Ids, ImageSet, counts, label_sets
from lockstep.data.loaders import EvalLoader, reader
from lockstep.data.picture_set import PictureSet
from lockstep.data.sources import to_evaluate
from lockstep.distributed.world import World
from lockstep.errors import UserError, reason
from lockstep.inference.classifier import Classifier
from lockstep.inference.loading import load as load_classifier
from lockstep.inference.pictures import ForCard, fitted
from lockstep.training.evaluation import ByClass, ClassCounts, Metrics, evaluate, write_scores
from lockstep.training.run_folder import Evaluation


@dataclass(frozen=True, eq=False, kw_only=True)
class Matched(ForCard):
    """Another set's samples of the classes that a model knows, prepared and labelled as it wants them."""

    other: ImageSet
    samples: Ids  # of the other set
    labels: Ids  # int64 [n], the model's
    label_sets: Array | None = None  # bool [sets, the model's classes] where samples have several labels

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, ids: Ids, epoch: int | None = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Images [b, C, H, W] and the model's labels int64 [b].
        Raises UserError for what can't be read as a picture, or has another shape than the model takes.
        """
        asked = self.samples[ids]
        labels = torch.from_numpy(self.labels[ids])
        if isinstance(self.other, PictureSet):
            images = torch.empty(len(ids), *self.shape, dtype=torch.uint8)
            for row, sample in enumerate(asked.tolist()):
                images[row] = self._fitted(self.other, sample)
            return images, labels
        images, _ = self.other.read(asked, None)
        if tuple(images.shape[1:]) == self.shape:
            return images, labels
        if images.dtype != torch.uint8 or images.shape[1] not in (1, 3):
            raise UserError(
                f"{self.name} has images {images.dtype} {list(images.shape[1:])}, and the model takes "
                f"{list(self.shape)}",
                "Name a folder, a table, or a set of pictures.",
            )
        whole = images.expand(-1, 3, -1, -1)
        fits = [fitted(image.contiguous(), self.card) for image in whole]
        return torch.stack(fits) if fits else images.new_empty(0, *self.shape), labels

    def _fitted(self, other: PictureSet, sample: int) -> Tensor:
        try:
            return fitted(other.source.read(sample), self.card)
        except Exception as error:  # whatever a decoder makes of a broken file
            raise UserError(
                f"{other.where(sample)} cannot be read as an image: {reason(error)}", "Replace or remove the file."
            ) from error


def evaluate_elsewhere(world: World, path: str, chosen: Evaluation) -> None:
    """Evaluate the weights in a file on `chosen.data`, on this process, as one of the world's."""
    classifier = load_classifier(path, device=str(world.device), trust_code=chosen.trust_code)
    side = classifier.card.shape[1]
    other = to_evaluate(chosen.data, chosen.execution.data_dir, side, chosen.follow_links, world)
    images, notes = matched(other, classifier.card)
    metrics, scores = scored(classifier, images, world, chosen.execution.workers)
    for note in notes:
        world.print(note)
    world.print(f"{path} on {images.name}: {metrics.described(len(images.classes))}")
    world.print(scores)
    if chosen.report and world.rank == 0:
        print(write_scores(scores, Path(chosen.report)))


def scored(classifier: Classifier, images: Matched, world: World, workers: int = 0) -> tuple[Metrics, ByClass]:
    """What the classifier makes of the samples, the same on every rank; all of them call it together."""
    card = classifier.card
    read = reader(images, world.device, "streaming", workers if len(images) > card.eval_batch_size else 0)
    loader = EvalLoader(images, classifier.prepare, world, read, card.eval_batch_size)
    counts = ClassCounts(images, world.device, thresholds=card.thresholds)
    metrics = evaluate(
        classifier.model, loader, world, card.precision, tta=card.tta, synchronized=True, observe=counts.add
    )
    return metrics, counts.scores(images.classes, world)


def matched(other: ImageSet, card: Card) -> tuple[Matched, list[str]]:
    """The samples whose class, by its name, the model knows; and lines on classes that only one of the two has.
    Raises UserError where they have no class in common.
    """
    places = {normalize("NFC", name): place for place, name in enumerate(card.classes)}
    to_card: Array = np.array([places.get(normalize("NFC", name), -1) for name in other.classes], np.int64)
    labels, sets = _labels(other), label_sets(other)
    if sets is None:
        known, mapped = to_card[labels], None
    else:
        here: Array = to_card >= 0
        mapped = np.zeros((len(sets), len(card.classes)), np.bool_)
        mapped[:, to_card[here]] = sets[:, here]
        known = np.where(np.any(sets[:, ~here], axis=1)[labels], -1, labels)
    if not (to_card >= 0).any() or not (known >= 0).any():
        raise UserError(
            f"{other.name} and the model have no class in common: there {listed(other.classes)}; here "
            f"{listed(card.classes)}",
            "Classes are matched by their names: name the folders, or the labels of the table, as the model does.",
        )
    notes = []
    held = counts(other, labels)
    if strange := [name for place, name in enumerate(other.classes) if to_card[place] < 0]:
        left_out = int((known < 0).sum())
        notes.append(
            f"note: the model does not know {len(strange)} class(es) of {other.name}, whose {left_out:,} images are "
            f"left out: {listed(strange)}"
        )
    there = {to_card[place] for place in np.flatnonzero(held)}
    if absent := [name for place, name in enumerate(card.classes) if place not in there]:
        notes.append(
            f"note: {other.name} has no image of {len(absent)} of the model's {len(card.classes)} classes: "
            f"{listed(absent)}"
        )
    samples = np.flatnonzero(known >= 0)
    found = Matched(
        card=card, name=other.name, fingerprint=other.fingerprint, other=other, samples=samples, labels=known[samples],
        label_sets=mapped,
    )  # fmt: skip
    return found, notes


def _labels(other: ImageSet) -> Array:
    """All labels, int64 [n]; where the set does not hold them, by reading every image."""
    held = getattr(other, "labels", None)
    if isinstance(held, np.ndarray):
        return held
    parts = np.array_split(np.arange(len(other)), max(1, len(other) // 250))
    return np.concatenate([other.read(ids, None)[1].numpy() for ids in parts])
