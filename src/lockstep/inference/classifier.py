"""A trained model as one uses it: from a picture to the names of what is on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.card import Card
from lockstep.data.augment import Augment
from lockstep.inference.pictures import fitted
from lockstep.training.evaluation import averaged
from lockstep.training.precision import autocast


@dataclass(frozen=True)
class Prediction:
    """The most likely classes of a picture, the first the likeliest, with their probabilities."""

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {p:.1%}" for name, p in zip(self.classes, self.probabilities, strict=True))


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

        Raises:
            UserError: for what can't be read as a picture.
        """
        return self.prepare(fitted(picture, self.card)[None], torch.zeros(1, dtype=torch.int64), None)[0]

    @torch.no_grad()
    def classify(self, *pictures: Any, top: int = 5) -> list[Prediction]:
        """The `top` likeliest classes of each picture: a path, a PIL image, or uint8 [3, h, w].

        Raises:
            UserError: for what can't be read as a picture.
        """
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        found: list[Prediction] = []
        size = self.card.eval_batch_size
        for start in range(0, len(pictures), size):
            images = torch.stack([self.transform(each) for each in pictures[start : start + size]])
            values, indices = likeliest(self(images.to(device)), top, self.card.outputs)
            found += [self.named(*row) for row in zip(indices.tolist(), values.tolist(), strict=True)]
        return found

    def named(self, indices: Sequence[int], values: Sequence[float]) -> Prediction:
        """A prediction from class numbers and their probabilities."""
        return Prediction(tuple(self.card.classes[k] for k in indices), tuple(values))


def likeliest(logits: Tensor, top: int, how: str = "softmax") -> tuple[Tensor, Tensor]:
    """Probabilities and class numbers [b, min(top, classes)] of logits [b, classes], the likeliest first.

    `how`: softmax, or sigmoid for a model that was trained on each class against all others.

    Of equal ones the lower class number comes first, on any device.
    """
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
    probabilities = logits.sigmoid() if how == "sigmoid" else logits.softmax(dim=1)
    return probabilities.gather(1, order), order
