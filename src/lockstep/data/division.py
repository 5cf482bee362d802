"""A validation part for a set that has none: by what each picture holds, so that no picture ever changes sides."""

from dataclasses import replace

import numpy as np

from lockstep.data.arrays import Array
from lockstep.data.contents import contents
from lockstep.data.folder import FolderSet
from lockstep.data.label_sets import counts as class_counts
from lockstep.errors import UserError
from lockstep.processes.world import World

_NAMED = 8  # classes whose counts stand in the note; of more, those with the fewest pictures to validate on


def divided(whole: FolderSet, fraction: float, world: World) -> tuple[FolderSet, FolderSet]:
    """Training and validation set; all ranks call it together.

    A picture is validated on where the first 64 bits of its content's SHA-256, as a fraction of 2^64, are below
    `fraction`. So files that are added, renamed, moved or listed otherwise move no other one, a larger fraction keeps
    what a smaller one chose, and copies of a picture are on the same side.

    Raises:
        UserError: where a class has no picture on one of the two sides.
    """
    chosen = contents(whole, world)[:, 0].view(np.uint64) < np.uint64(int(fraction * 2**64))
    counts = np.stack([class_counts(whole, whole.labels[side]) for side in (~chosen, chosen)])
    _require_both_sides(whole, fraction, counts)
    note = f"validation: {chosen.sum():,} of {len(whole):,} images, chosen by their content; {_counted(whole, counts)}"
    train = whole.taking(np.flatnonzero(~chosen), notes=(*whole.notes, note))
    val = whole.taking(np.flatnonzero(chosen), resized_crop=False, left_out="")
    return train, replace(val, notes=())


def _require_both_sides(whole: FolderSet, fraction: float, counts: Array) -> None:
    """counts: int64 [2, classes], of the images to train and to validate on."""
    for side, what, remedy in (
        (1, "validate", "Give a larger --val-fraction, or the class more images"),
        (0, "train", "Give a smaller --val-fraction, or the class more images"),
    ):
        if len(bare := np.flatnonzero(counts[side] == 0)):
            names = ", ".join(f"{whole.classes[k]} (of {counts[:, k].sum()})" for k in bare[:5])
            more = f" and {len(bare) - 5} more" if len(bare) > 5 else ""
            raise UserError(
                f"--val-fraction {fraction:g} leaves no image to {what} on for {names}{more} in {whole.name}",
                f"{remedy}; or put images aside by hand, as train/CLASS/FILE and val/CLASS/FILE.",
            )


def _counted(whole: FolderSet, counts: Array) -> str:
    """As "ant 450 + 50, bee 455 + 45"."""
    order = np.argsort(counts[1], kind="stable")[:_NAMED] if counts.shape[1] > _NAMED else np.arange(counts.shape[1])
    named = ", ".join(f"{whole.classes[k]} {counts[0, k]:,} + {counts[1, k]:,}" for k in order)
    return f"fewest: {named}" if counts.shape[1] > _NAMED else named
