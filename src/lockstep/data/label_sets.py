"""Several labels a picture: its label is then the number of a set of classes, and a table says which those are.

So everything between a file and the loss carries one whole number a picture, as where each has one class.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.arrays import Array, Ids, ImageSet


def label_sets(images: ImageSet) -> Array | None:
    """bool [sets, classes]: row k has the classes that label k means; None where label k means classes[k] alone."""
    found: Array | None = getattr(images, "label_sets", None)
    return found


def numbered(sets: Sequence[Collection[int]], classes: int) -> tuple[Ids, Array]:
    """The number of each picture's set, int64 [n], and the table; numbers go by the sets' classes, in order."""
    keys = [tuple(sorted(set(each))) for each in sets]
    distinct = sorted(set(keys))
    table = np.zeros((len(distinct), classes), np.bool_)
    for row, members in enumerate(distinct):
        table[row, list(members)] = True
    number = {key: row for row, key in enumerate(distinct)}
    return np.array([number[key] for key in keys], np.int64), table


def counts(images: ImageSet, labels: Ids) -> Ids:
    """Pictures of each class among these labels, int64 [classes]."""
    sets = label_sets(images)
    if sets is None:
        return np.bincount(labels, minlength=len(images.classes))
    return np.bincount(labels, minlength=len(sets)) @ sets.astype(np.int64)


def label_name(images: ImageSet, label: int) -> str:
    """What a label is called: the class's name, or those of its set."""
    sets = label_sets(images)
    if sets is None:
        return images.classes[label]
    return " + ".join(images.classes[k] for k in np.flatnonzero(sets[label])) or "none"


def table_on(images: ImageSet, device: Any) -> Tensor | None:
    """`label_sets` as bool [sets, classes] on a device."""
    sets = label_sets(images)
    return None if sets is None else torch.from_numpy(sets).to(device)


def members(labels: Tensor, classes: int, sets: Tensor | None) -> Tensor:
    """bool [b, classes]: the classes of each of these labels, int64 [b]; `sets` as `table_on` gives it."""
    if sets is not None:
        return sets[labels]
    return labels[:, None] == torch.arange(classes, device=labels.device)
