"""Pictures that come twice, by their content: to train and to validate on, or under several classes."""

from collections.abc import Iterator

import numpy as np
import torch

from lockstep.data.arrays import Array, Ids, ImageSet
from lockstep.data.contents import contents, require_same_list
from lockstep.data.folder import FolderSet
from lockstep.data.label_sets import label_name
from lockstep.errors import UserError
from lockstep.processes.world import World

_AT_ONCE = 100_000  # pictures that are looked through without being asked to
_NAMED = 3


def duplicates(train: ImageSet, val: ImageSet, look: str, world: World) -> list[str]:
    """A line on pictures that are in both sets, and one on those under several classes; all ranks call it together.

    Files of a size that no other has are not read. `look`: "always", "never", or "auto": where there are at most
    100,000 pictures whose sizes are known. Sets of another kind than files of pictures are not looked through.
    """
    if look == "never" or not isinstance(train, FolderSet) or not isinstance(val, FolderSet):
        return []
    if look == "auto" and (len(train) + len(val) > _AT_ONCE or not train.sized):
        return []
    world.status("starting: looking for pictures that come twice")
    sizes = np.concatenate([_sizes(each, world) for each in (train, val)])
    _, places, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(counts[places] > 1)  # samples of train, then those of val
    of_train = candidates[candidates < len(train)]
    of_val = candidates[candidates >= len(train)] - len(train)
    digests = np.concatenate([contents(train, world, of_train), contents(val, world, of_val)])
    groups = list(_groups(digests, candidates))
    return [*_in_both(train, val, groups), *_under_several(train, val, groups)]


def _sizes(images: FolderSet, world: World) -> Array:
    """Bytes of each picture, int64 [n]; each rank asks for its share."""
    require_same_list(images, world)
    sizes = np.zeros(len(images), np.int64)
    share = world.share(len(images))
    for sample in range(share.start, share.stop):
        try:
            sizes[sample] = images.size_of(sample)
        except OSError as error:
            raise UserError(f"{images.where(sample)}: {error.strerror}", "Put it back, or remove it.") from error
    world.sum(torch.from_numpy(sizes))
    return sizes


def _groups(digests: Array, samples: Ids) -> Iterator[list[int]]:
    """Samples that have a digest in common, int64 [n, 2], in their order."""
    if not len(samples):
        return
    order = np.lexsort((samples, digests[:, 1], digests[:, 0]))
    edges = np.flatnonzero((digests[order][1:] != digests[order][:-1]).any(axis=1)) + 1
    for group in np.split(samples[order], edges):
        if len(group) > 1:
            yield group.tolist()


def _in_both(train: FolderSet, val: FolderSet, groups: list[list[int]]) -> list[str]:
    first = len(train)
    pairs = sorted((sample - first, group[0]) for group in groups if group[0] < first for sample in group)
    pairs = [(sample, twin) for sample, twin in pairs if sample >= 0]
    if not pairs:
        return []
    named = "; ".join(f"{val.named(sample)} = {train.named(twin)}" for sample, twin in pairs[:_NAMED])
    more = ", ..." if len(pairs) > _NAMED else ""
    return [
        f"note: {len(pairs):,} of {len(val):,} images to validate on are among those to train on as well, by their "
        f"content, so the accuracy flatters: {named}{more}"
    ]


def _under_several(train: FolderSet, val: FolderSet, groups: list[list[int]]) -> list[str]:
    def told(sample: int) -> tuple[str, str]:
        images, number = (train, sample) if sample < len(train) else (val, sample - len(train))
        return label_name(images, int(images.labels[number])), images.named(number)

    found = []
    for group in sorted(groups):
        by_class = dict(reversed([told(sample) for sample in group]))  # the first of each class
        if len(by_class) > 1:
            found.append(" and ".join(f"{path} ({name})" for name, path in sorted(by_class.items())))
    if not found:
        return []
    more = "; ..." if len(found) > _NAMED else ""
    return [f"note: {len(found):,} image(s) stand under several classes: {'; '.join(found[:_NAMED])}{more}"]
