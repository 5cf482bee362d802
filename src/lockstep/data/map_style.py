"""A user's map-style Dataset as an image set, its random transforms keyed by sample."""

import hashlib
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lockstep.data.agreement import members
from lockstep.data.arrays import Ids, ImageSet, check_labels
from lockstep.data.seeding import generators
from lockstep.errors import UserError
from lockstep.randomness import bits_np, stream

EXPECTED = (
    "Give (train, val), each of them a pair of tensors (images [n, C, H, W] uint8 or float, labels [n], or of "
    "several a picture 0 and 1 [n, classes]), a map-style Dataset of (image, label) pairs, or an ImageSet."
)


def described(value: Any) -> str:
    """What a value is, in a few words, for a message."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value[:4])})"
    return f"a {type(value).__name__}"


@dataclass(frozen=True, eq=False)
class DatasetSet:
    """A user's map-style Dataset as an image set.

    Before each sample torch's, Python's and NumPy's generators are seeded by (seed, epoch, sample id), and put back
    after the batch: what the Dataset's own random transforms draw depends on no rank, worker or batch. It takes 18 us a
    sample. Out of reach are generators of its own, as a NumPy one that it holds.
    """

    name: str
    dataset: Any
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    seed: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, ids: Ids, epoch: int | None = None, draws: Ids | None = None) -> tuple[Tensor, Tensor]:
        """Images [b, C, H, W] of the Dataset's type, and labels int64 [b]; epoch None: the same draws each time.

        `draws`: what each sample's draws are keyed by, where that is not its id: it may come several times.

        Raises:
            UserError: for a label outside the classes or an image of another shape, naming the sample.
        """
        images, labels = [], []
        for sample, (image, label) in zip(ids.tolist(), self._drawn(ids, epoch, draws), strict=True):
            image = _as_image(image, f"{self.name}: sample {sample}")
            if tuple(image.shape) != self.shape:
                raise UserError(
                    f"{self.name}: sample {sample} is {list(image.shape)}, sample 0 is {list(self.shape)}",
                    "A batch needs one shape: resize and crop in the Dataset.",
                )
            number = _as_label(label, f"{self.name}: sample {sample}")
            check_labels(self.name, np.array([number]), len(self.classes), sample)
            images.append(image)
            labels.append(number)
        if not images:  # a rank without a share of a short batch
            first = _as_image(self.dataset[0][0], f"{self.name}: sample 0")
            return first.new_empty(0, *self.shape), torch.empty(0, dtype=torch.int64)
        return torch.stack(images), torch.tensor(labels)

    def _drawn(self, ids: Ids, epoch: int | None, draws: Ids | None) -> list[Any]:
        """The Dataset's samples, each by draws of its own."""
        key = stream(self.seed, "dataset", "evaluation" if epoch is None else epoch)
        seeds, drawn = bits_np(key, ids if draws is None else draws).tolist(), []
        with generators(everyones=True) as seed:
            for sample, mine in zip(ids.tolist(), seeds, strict=True):
                seed(mine, True)
                drawn.append(self.dataset[sample])
        return drawn


def _as_image(image: Any, where: str) -> Tensor:
    """A PIL image or a tensor as [C, H, W], uint8 or floating-point."""
    if hasattr(image, "convert") and hasattr(image, "getbands"):  # PIL's, without importing it
        pixels = np.array(image if image.mode in ("L", "RGB") else image.convert("RGB"))
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())
    if isinstance(image, Tensor) and image.ndim == 3 and (image.dtype == torch.uint8 or image.is_floating_point()):
        return image
    shape = f" {list(image.shape)} {image.dtype}" if isinstance(image, Tensor) else ""
    raise UserError(
        f"{where} is {described(image)}{shape}, not an image",
        "Images are PIL images or tensors [C, H, W], uint8 or floating-point.",
    )


def _as_label(label: Any, where: str) -> int:
    """A class number out of an integer, or a tensor or array of one."""
    value = np.asarray(label.detach().cpu() if isinstance(label, Tensor) else label)
    if value.size != 1 or value.dtype.kind not in "iub":
        said = str(label) if value.size == 1 else f"{described(label)}, shape {list(value.shape)}"
        raise UserError(
            f"{where} has the label {said}, which is no class number",
            "A label is a whole number from 0 to classes - 1; of a one-hot vector take its argmax().",
        )
    return int(value.item())


def adapted(name: str, value: Any, seed: int) -> ImageSet:
    """An ImageSet as it is, a map-style Dataset as one. `seed`: of the Dataset's random draws.

    Raises:
        UserError: for anything else, and a Dataset that doesn't tell its classes or gives no image and label.
    """
    if hasattr(value, "read"):
        wanted = ("name", "classes", "shape", "mean", "std", "fingerprint", "__len__")
        if missing := set(wanted) - set(dir(value)):
            raise UserError(f"{name} is an ImageSet without {', '.join(sorted(missing))}", EXPECTED)
        made: ImageSet = value
        return made
    if isinstance(value, IterableDataset):
        raise UserError(
            f"{name} is an IterableDataset ({type(value).__name__}), whose samples come in an order of its own",
            "Samples are asked for by number here: make it a map-style Dataset with __getitem__ and __len__.",
        )
    if not (hasattr(value, "__getitem__") and hasattr(value, "__len__")) or isinstance(value, tuple | list | Tensor):
        raise UserError(f"{name} is {described(value)}", EXPECTED)
    if len(value) == 0:
        raise UserError(f"{name} is empty", EXPECTED)
    first = value[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(f"{name}: sample 0 is {described(first)}, not (image, label)", EXPECTED)
    channels, height, width = _as_image(first[0], f"{name}: sample 0").shape
    classes = _classes(name, value)
    mean, std = (tuple(getattr(value, key, (0.5,) * channels)) for key in ("mean", "std"))
    kind = type(value)
    shape = (channels, height, width)
    identity = repr((kind.__module__, kind.__qualname__, len(value), classes, shape, members(value)))
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return DatasetSet(name, value, classes, shape, mean, std, digest, seed)


def _classes(name: str, dataset: Any) -> tuple[str, ...]:
    """From what the Dataset, or one that it wraps (as Subset does), says of its classes or its labels."""
    inner = dataset
    while inner is not None:
        if len(getattr(inner, "classes", ())):
            return tuple(map(str, inner.classes))
        for attribute, found in _stated(inner):
            labels = np.asarray(found)
            if labels.ndim != 1 or labels.dtype.kind not in "iu":
                raise UserError(
                    f"{name}: `{attribute}` are {labels.dtype} {list(labels.shape)}, not class numbers",
                    "Whole numbers from 0 to classes - 1, one for each sample; of one-hot vectors take argmax().",
                )
            check_labels(name, labels, int(labels.max()) + 1)
            return tuple(map(str, range(int(labels.max()) + 1)))
        inner = getattr(inner, "dataset", None)
    raise UserError(
        f"{name}: {described(dataset)} does not say which classes there are",
        "Give it an attribute `classes` (their names) or `targets` (a label for each sample).",
    )


def _stated(dataset: Any) -> list[tuple[str, Any]]:
    """The labels of all samples, where a Dataset keeps them: under which name, and themselves."""
    tensors: Any = getattr(dataset, "tensors", ())  # TensorDataset's
    kept = {name: getattr(dataset, name, ()) for name in ("targets", "labels")}
    kept |= {"tensors[1]": tensors[1]} if len(tensors) == 2 else {}
    return [(name, found) for name, found in kept.items() if isinstance(found, Sized) and len(found)]
