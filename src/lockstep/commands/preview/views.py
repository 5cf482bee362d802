"""Some of a run's pictures, as they are and as the network sees them in several epochs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.data.arrays import ImageSet
from lockstep.data.label_sets import label_name
from lockstep.processes.world import World
from lockstep.training.assemble import load_data, train_loader


@dataclass(frozen=True)
class Views:
    """Pictures of one size, normalising undone."""

    name: str  # of the set
    titles: tuple[str, ...]  # class and sample id of each row
    before: Tensor  # uint8 [n, C, H, W], with nothing random
    after: Tensor  # uint8 [epochs, n, C, H, W]


def views(config: Config, samples: int, epochs: int) -> Views:
    """The run's first pictures, in this process and by the run's own loader.

    What mixes pictures of a batch with each other comes after this, and is not shown.
    """
    config, world = config.with_execution(device="cpu", workers=0, cache=""), World.single()  # to fill one takes hours
    images, _ = load_data(config, world)
    train = train_loader(config, images, world)
    order = train.order
    ids = np.concatenate([order.step(0, t) for t in range(min(len(train), -(-samples // order.batch_size)))])[:samples]
    pixels, labels, numbers = next(iter(train.read([(ids, None)])))
    shown = [train.augment(pixels, numbers, None)]
    for stored, _, numbers in train.read([(ids, epoch) for epoch in range(epochs)]):
        shown.append(train.augment(stored, numbers, len(shown) - 1))
    pictures = _stored(torch.stack(shown), images, normalised=pixels.dtype != torch.uint8)
    titles = [f"{label_name(images, label)} ({n % len(images)})" for label, n in zip(labels.tolist(), ids, strict=True)]
    return Views(images.name, tuple(titles), pictures[0], pictures[1:])


def _stored(pictures: Tensor, images: ImageSet, normalised: bool) -> Tensor:
    """uint8 of what the network takes, [..., C, H, W]; from darkest to brightest where a set has it `normalised`."""
    if normalised:
        low, high = pictures.min(), pictures.max()
        pictures = (pictures - low) / (high - low).clamp(min=1e-12)
    else:
        mean, std = (torch.tensor(values)[:, None, None] for values in (images.mean, images.std))
        pictures = pictures * std + mean
    return (pictures * 255).round().clamp(0, 255).to(torch.uint8)
