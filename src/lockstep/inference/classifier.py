"""A trained model as one uses it: from pictures to the names of what is on them, here or over all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.weights import Card
from lockstep.data.augment import Augment
from lockstep.data.loaders import EvalLoader, reader
from lockstep.distributed.world import World
from lockstep.inference.pictures import BROKEN, Pictures, fitted
from lockstep.training.evaluation import averaged, outputs, present
from lockstep.training.precision import autocast


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of a picture, the first the likeliest, with their probabilities.

    `labels`: of a model for several labels a picture, all classes whose probability reaches the class's threshold.
    """

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    labels: tuple[str, ...] | None = None

    def __str__(self) -> str:
        likely = ", ".join(f"{name} {p:.1%}" for name, p in zip(self.classes, self.probabilities, strict=True))
        return likely if self.labels is None else f"{' + '.join(self.labels) or 'none'}  ({likely})"


class Classifier(nn.Module):
    """A trained model, ready to use: `classifier(images)` gives logits, `classifier.classify(path)` names.

    Attributes:
        model: the bare network, in evaluation mode.
        card: classes, input shape, normalisation.
        prepare: what becomes of pictures uint8 [b, C, H, W] before the network.
    """

    def __init__(self, model: nn.Module, card: Card) -> None:
        super().__init__()
        self.model, self.card = model, card
        self.eval()
        self.prepare = Augment(card.mean, card.std, image_size=card.image_size)

    def forward(self, images: Tensor) -> Tensor:
        """Logits float [b, classes] of what `transform` made, [b, C, H, W], as evaluation computes them."""
        with autocast(self.card.precision, images.device)():
            logits = averaged(self.model, images, self.card.tta)
        return logits if logits.dtype == torch.float64 else logits.float()

    def transform(self, picture: Any) -> Tensor:
        """The network's input, float32 [C, H, W], of a path, a PIL image, or uint8 [3, h, w].
        Raises UserError for what can't be read as a picture.
        """
        return self.prepare(fitted(picture, self.card)[None], torch.zeros(1, dtype=torch.int64), None)[0]

    @torch.no_grad()
    def classify(self, *pictures: Any, top: int = 5) -> list[Prediction]:
        """The `top` likeliest classes of each picture: a path, a PIL image, or uint8 [3, h, w].
        Raises UserError for what can't be read as a picture.
        """
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        found: list[Prediction] = []
        size = self.card.eval_batch_size
        for start in range(0, len(pictures), size):
            images = torch.stack([self.transform(each) for each in pictures[start : start + size]])
            logits = self(images.to(device))
            values, indices = likeliest(logits, top, self.card.outputs)
            there = present(logits.cpu(), self.card.thresholds).tolist()
            found += [self.named(*row) for row in zip(indices.tolist(), values.tolist(), there, strict=True)]
        return found

    def named(self, indices: Sequence[int], values: Sequence[float], there: Sequence[bool] = ()) -> Prediction:
        """A prediction from class numbers, their probabilities, and for each class whether it reaches its threshold."""
        names = self.card.classes
        labels = tuple(names[k] for k, is_so in enumerate(there) if is_so)
        return Prediction(tuple(names[k] for k in indices), tuple(values), labels if self.card.thresholds else None)


def likeliest(logits: Tensor, top: int, how: str = "softmax") -> tuple[Tensor, Tensor]:
    """Probabilities and class numbers [b, min(top, classes)] of logits [b, classes], the likeliest first.

    `how`: softmax, or sigmoid for a model that was trained on each class against all others.

    Of equal ones the lower class number comes first, on any device.
    """
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
    probabilities = logits.sigmoid() if how == "sigmoid" else logits.softmax(dim=1)
    return probabilities.gather(1, order), order


@dataclass(frozen=True)
class Answer:
    """A picture's path and what is on it, or why it could not be read."""

    path: str
    prediction: Prediction
    error: str = ""


def predictions(
    classifier: Classifier,
    paths: Sequence[str],
    world: World,
    top: int = 5,
    workers: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """What is on each picture, in their order, on all ranks; bit by bit the same on any number of them.

    Pictures go in chunks of the size that the run's evaluation had, whole chunks on a rank: the same files in the same
    order have the probabilities that evaluation saw.

    Args:
        top: classes to name for a picture.
        workers: processes that read pictures, for each rank.
        tick: called before each chunk of this rank.
    """
    card = classifier.card
    pictures = Pictures(card, "the pictures", "", tuple(paths))
    read = reader(pictures, world.device, "streaming", workers)
    loader = EvalLoader(pictures, classifier.prepare, world, read, card.eval_batch_size)
    top = min(top, len(card.classes))
    values = torch.zeros(len(paths), top, device=world.device)
    indices = torch.zeros(len(paths), top, dtype=torch.int64, device=world.device)
    states = torch.zeros(len(paths), dtype=torch.int64, device=world.device)
    there = torch.zeros(len(paths), len(card.classes) if card.thresholds else 0, dtype=torch.int64, device=world.device)
    for chunk, logits, state in outputs(classifier.model, loader, world, card.precision, tick, card.tta, True):
        rows = slice(chunk * card.eval_batch_size, chunk * card.eval_batch_size + len(logits))
        values[rows], indices[rows] = likeliest(logits, top, card.outputs)
        states[rows] = state
        if card.thresholds:
            there[rows] = present(logits.cpu(), card.thresholds).to(there)
    tables = values, indices, states, there
    summed: list[Tensor] = [world.sum(table).cpu() for table in tables]  # the others hold zeros
    answers = []
    for sample, (probabilities, classes, state, labels) in enumerate(zip(*map(Tensor.tolist, summed), strict=True)):
        if state == BROKEN:
            answers.append(Answer(paths[sample], Prediction((), ()), pictures.fault(sample)))
        else:
            answers.append(Answer(paths[sample], classifier.named(classes, probabilities, labels)))
    return answers
