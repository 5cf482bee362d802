"""Transforms of single pictures whose draws are keyed by (seed, epoch, sample id, which transform).

Before each transform of each sample the generators that it draws from are seeded, and put back after the batch; so a
picture's look depends on nothing else: not on the batch, worker, rank, loader, device, order or number of processes.
Seeding takes 1.5 us a transform and sample (torch's generator; 7 with Python's and NumPy's, for functions of the
user's), and RandAugment itself 180 of a picture of 32x32 pixels. torch's Mersenne twister keeps the seed's low 32 bits.

It is the CPU that works here, with one thread, whatever the device: so bits do not depend on these either.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.arrays import Ids, ImageSet
from lockstep.data.seeding import generators
from lockstep.data.transform_names import Apply, built, is_own, word_of
from lockstep.errors import UserError, reason
from lockstep.randomness import bits_np, stream

_TRIED = 4  # times at the start, of one sample: a fault that shows now and then has some chance to


@dataclass(frozen=True)
class Step:
    """One transform of the list."""

    spec: str  # as it was typed
    word: str  # by which its draws are keyed: the name and how many of this name are before it
    apply: Apply
    own: bool  # a function of the user's


@dataclass(frozen=True)
class Transforms:
    """The transforms of a run, in their order. Pickling keeps their names alone.

    Args:
        specs: as `--augment` takes them.
        seed: the run's seed.
        shape: channels, height and width of the pictures. One that comes out in another size is put back to this one,
            bilinear with antialiasing.
        mean: of the set, per channel, of pixels in [0, 1].
    """

    specs: tuple[str, ...]
    seed: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    steps: tuple[Step, ...] = ()

    def __reduce__(self) -> Any:
        return transforms, (self.specs, self.seed, self.shape, self.mean)

    def __call__(self, images: Tensor, keys: Ids, epoch: int) -> Tensor:
        """images: uint8 [b, C, H, W], on the CPU; may be written to. keys: int64 [b], the sample ids.

        Returns uint8 [b, C, H, W].

        Raises:
            UserError: for a transform that fails or makes no picture, naming it and the sample.
        """
        out = torch.empty_like(images)
        seeds = [bits_np(stream(self.seed, "augment", step.word, epoch), keys).tolist() for step in self.steps]
        with generators(any(step.own for step in self.steps)) as seed, torch.no_grad():
            for row, sample in enumerate(keys.tolist()):
                image = images[row]
                for step, mine in zip(self.steps, seeds, strict=True):
                    seed(mine[row], step.own)
                    image = self._applied(step, image, sample, epoch)
                if image.shape != out.shape[1:]:
                    image = F.interpolate(image[None], self.shape[1:], mode="bilinear", antialias=True)[0]
                out[row] = image
        return out

    def _applied(self, step: Step, image: Tensor, sample: int, epoch: int) -> Tensor:
        try:
            made = step.apply(image)
        except Exception as error:
            if step.own:  # its traceback is the user's best guide
                error.add_note(f"in --augment {step.spec}, sample {sample}, epoch {epoch}")
                raise
            raise UserError(f"--augment {step.spec}, sample {sample}: {reason(error)}", "Change its values.") from error
        if not isinstance(made, Tensor) or made.dtype != torch.uint8 or made.ndim != 3:
            got = f"{made.dtype} {list(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
            raise UserError(
                f"--augment {step.spec} makes {got} of a picture",
                "It takes and returns a uint8 tensor [C, H, W]; normalising comes later.",
            )
        if made.shape[0] != self.shape[0] or not made.numel():
            raise UserError(
                f"--augment {step.spec} makes {list(made.shape)} of a picture of {list(image.shape)}",
                f"The model takes {self.shape[0]} channel(s), as `grayscale:3` keeps three.",
            )
        return made


def transforms(
    specs: tuple[str, ...], seed: int, shape: tuple[int, int, int], mean: tuple[float, ...]
) -> Transforms | None:
    """The transforms that a run's `--augment` names; None where it names none.

    Raises:
        UserError: for an unknown name, and values that a transform does not take.
    """
    steps, before = [], Counter[str]()
    for spec in specs:
        word = word_of(spec)
        steps.append(Step(spec, f"{word} {before[word]}", built(spec, shape, mean), is_own(spec)))
        before[word] += 1
    return Transforms(specs, seed, shape, mean, tuple(steps)) if steps else None


def tried_transforms(specs: tuple[str, ...], seed: int, images: ImageSet) -> Transforms | None:
    """The transforms for a set, tried on its first picture, so that what can't work fails before the first step.

    Raises:
        UserError: also for a set of pictures that are no uint8.
    """
    found = transforms(specs, seed, images.shape, images.mean)
    if found is None:
        return None
    first = np.zeros(1, np.int64)
    pixels, _ = images.read(first, None)
    if pixels.dtype != torch.uint8:
        raise UserError(
            f"--augment {specs[0]}: the pictures of {images.name} are {pixels.dtype}, and taken as normalised already",
            "Give uint8 pictures, or transform them in the set itself.",
        )
    for epoch in range(_TRIED):
        found(pixels.clone(), first, epoch)
    return found
