"""What a weights file says of itself: enough to use it with nothing but the file."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from lockstep.checkpoint.weights import note_of
from lockstep.config import Config
from lockstep.data.arrays import ImageSet
from lockstep.errors import UserError


@dataclass(frozen=True)
class Card:
    """How a trained model is to be used: what goes in, and what comes out means."""

    model: str  # as --model takes it
    classes: tuple[str, ...]  # output k is classes[k]
    shape: tuple[int, int, int]  # channels, height and width of a picture before augmentation
    image_size: int  # the side that the model sees (0: as `shape` has it)
    crop_pct: float  # of a picture's short side, that the centre keeps: timm's word
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]
    std: tuple[float, ...]
    precision: str
    tta: str
    eval_batch_size: int  # images of one forward pass: other shapes may round otherwise
    dataset: str
    interpolation: str = "bilinear"
    initial_weights: str = ""  # whose the run began with: source and licence
    outputs: str = "softmax"  # what makes probabilities of logits; "sigmoid": each class for itself
    decode_size: int = 0  # the shorter side that a picture is shrunk to first, upright (0: it is taken as stored)

    @property
    def side(self) -> int:
        """The side of an image as the model sees it, in pixels."""
        return self.image_size or self.shape[1]

    @classmethod
    def of(cls, config: Config, images: ImageSet, initial_weights: str = "") -> "Card":
        """The card of what a config trains on a set."""
        return cls(
            model=config.model.model,
            classes=tuple(images.classes),
            shape=images.shape,
            image_size=config.data.image_size,
            crop_pct=getattr(images, "crop_pct", 1.0),  # a set of arrays, or a user's own, has whole pictures
            mean=tuple(images.mean),
            std=tuple(images.std),
            precision=config.precision,
            tta=config.tta,
            eval_batch_size=config.execution.eval_batch_size,
            dataset=config.data.dataset,
            interpolation=getattr(images, "interpolation", "bilinear"),
            initial_weights=initial_weights,
            decode_size=config.data.decode_size,
            outputs="sigmoid" if config.optim.loss == "bce" else "softmax",
        )

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it: text as it is, the rest as JSON."""
        values = dataclasses.asdict(self)
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}

    @classmethod
    def read(cls, path: str | Path) -> "Card":
        """The card in a weights file. Raises UserError where it has none, or a damaged one."""
        return cls.from_metadata(note_of(path), str(path))

    @classmethod
    def from_metadata(cls, note: dict[str, str], where: str) -> "Card":
        """The card among a file's metadata; `where` names the file in the error."""
        hints = get_type_hints(cls)
        if missing := [name for name in hints if name not in note]:
            raise UserError(
                f"{where} does not say what model it is for: {', '.join(missing)} missing",
                "Name a run folder, or weights that `lockstep train` or `lockstep export` left.",
            )
        try:
            card = cls(**{name: _read(note[name], hint) for name, hint in hints.items()})
            sound = len(card.shape) == 3 and len(card.mean) == len(card.std) == card.shape[0] and card.side > 0
            sound = sound and 0 < card.crop_pct <= 1 and card.eval_batch_size > 0 and all(card.std)
            sound = sound and card.decode_size >= 0 and card.outputs in ("softmax", "sigmoid")
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: what it says of its model is damaged: {error}", _AGAIN) from error
        if not sound:
            raise UserError(f"{where}: what it says of its model can't be: {card}", _AGAIN)
        return card


_AGAIN = "Copy or export the file again."


def _read(text: str, hint: Any) -> Any:
    if hint is str:
        return text
    value = json.loads(text)
    if hint in (int, float):
        return hint(value)
    each = hint.__args__[0]
    if not isinstance(value, list):
        raise ValueError(f"{text[:40]} is no list")
    return tuple(each(item) for item in value)
