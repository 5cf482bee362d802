"""What pictures hold, by a hash of their bytes: a validation part that never changes, and pictures that come twice."""

import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch

from lockstep.data.image_sets import Array, Ids, ImageSet, counts, label_name
from lockstep.data.picture_set import PictureSet, user_cache
from lockstep.distributed.files import atomic_write
from lockstep.distributed.world import World
from lockstep.errors import UserError, shown

_WORTH_S = 2.0  # hashing that takes longer is reported, and what came of it is kept
_WORDS = 2  # int64 of a hash: 128 bits, so that a billion pictures have no two by chance
_AT_ONCE = 100_000  # pictures that are searched for duplicates without being asked to
_SHOWN, _SHOWN_CLASSES = 3, 8


def hashes(images: PictureSet, world: World, ids: Ids | None = None) -> Array:
    """The first 128 bits of SHA-256 of the pictures as they are stored, int64 [n, 2]; all ranks call it together.

    What took longer than two seconds is kept below ~/.cache/lockstep (or XDG_CACHE_HOME), and used again for files
    whose size, inode and times of change are the same. Raises UserError for a file that can't be read, and where the
    ranks' machines don't list the same files.
    """
    chosen = np.arange(len(images), dtype=np.int64) if ids is None else ids
    if (indexed := getattr(images.source, "digests", None)) is not None:  # an index of shards has them
        return np.asarray(indexed(chosen))
    _require_same_list(images, world)
    name = hashlib.sha256(images.name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    file, begun = user_cache("contents") / f"{name}.npy", time.monotonic()
    known = {tuple(row[:_WORDS]): row[_WORDS:] for row in _kept(file).tolist()}
    table = np.zeros((len(chosen), 2 * _WORDS), np.int64)  # what the file was, and what was in it
    part, hashed, due = world.shard(len(chosen)), 0, begun + 1
    for row, sample in enumerate(chosen[part].tolist(), part.start):
        if time.monotonic() > due:
            due = time.monotonic() + 1
            done = (row - part.start) / (part.stop - part.start)
            world.status(f"starting: hashing the pictures of {images.name}: {done:.0%}")
        with images.naming(sample):
            mark = _mark(images, sample)
            found = known.get(mark) if any(mark) else None
            if found is None:
                found = content_words(images.source.read(sample))
                hashed += 1
        table[row] = (*mark, *found)
    world.sum(torch.from_numpy(table))  # the others hold zeros there
    worth = world.largest([int(hashed > 0 and time.monotonic() - begun > _WORTH_S)])[0]
    if worth and world.local_rank == 0:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file, durable=False) as temporary, temporary.open("wb") as out:
                np.save(out, table)
        except OSError as error:  # then the next run hashes again
            print(f"note: hashes are not kept in {file.parent}: {error.strerror}", file=sys.stderr)
    return table[:, _WORDS:]


def _require_same_list(images: PictureSet, world: World) -> None:
    """Raise UserError on all ranks where they have not all found the same files: a hash would be of another one."""
    digest = hashlib.sha256(images.labels.tobytes())
    for sample in range(len(images)):
        digest.update(images.source.key(sample).encode("utf-8", "surrogatepass") + b"\0")
    everyone = world.gather([len(images), digest.hexdigest()])
    if other := next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), 0):
        what = f"{everyone[0][0]:,} files on rank 0 and {everyone[other][0]:,} on rank {other}, or other names"
        raise UserError(f"{images.name} holds {what}", "Give every machine the same copy of the data.")


def content_words(data: bytes) -> tuple[int, ...]:
    """The first 128 bits of SHA-256 as two int64."""
    return tuple(np.frombuffer(hashlib.sha256(data).digest(), "<i8", _WORDS).tolist())


def _kept(file: Path) -> Array:
    """Hashes of earlier runs, by marks of the files: int64 [n, 4]; none where that isn't there, or is damaged."""
    try:
        found: Array = np.load(file, allow_pickle=False)
        return found if found.shape[1:] == (2 * _WORDS,) and found.dtype == np.int64 else np.empty((0, 2 * _WORDS))
    except (OSError, ValueError, EOFError):
        return np.empty((0, 2 * _WORDS))


def _mark(images: PictureSet, sample: int) -> tuple[int, ...]:
    """Of a file as it is now: another content comes with another time of change. Raises OSError."""
    size, *times = images.source.stat(sample)
    if not any(times):
        return (0,) * _WORDS
    return content_words(repr((images.source.key(sample), size, *times)).encode("utf-8", "surrogatepass"))


def divided(whole: PictureSet, fraction: float, world: World) -> tuple[PictureSet, PictureSet]:
    """Training and validation set; all ranks call it together.

    A picture is validated on where the first 64 bits of its content's SHA-256, as a fraction of 2^64, are below
    `fraction`. So files that are added, renamed, moved or listed otherwise move no other one, a larger fraction keeps
    what a smaller one chose, and copies of a picture are on the same side. A class without a picture on one of the
    sides gets the one there whose number is nearest to it; a single one is trained on.
    """
    values = hashes(whole, world)[:, 0].view(np.uint64)
    limit = np.uint64(int(fraction * 2**64))
    moved: set[int] = set()
    for k in range(len(whole.classes)):
        members = whole.labels == k if whole.label_sets is None else whole.label_sets[whole.labels, k]
        own = np.unique(values[members])
        if len(own) and own[-1] < limit:
            moved.add(int(own[-1]))
        elif len(own) > 1 and own[0] >= limit:
            moved.add(int(own[0]))
    chosen = (values < limit) ^ np.isin(values, np.array(sorted(moved), np.uint64))
    if not chosen.any():
        raise UserError(f"{whole.name} has no class with two different images to divide", "Add images.")
    tally = np.stack([counts(whole, whole.labels[side]) for side in (~chosen, chosen)])
    few = tally.shape[1] > _SHOWN_CLASSES
    order = np.argsort(tally[1], kind="stable")[:_SHOWN_CLASSES] if few else np.arange(tally.shape[1])
    listed = ", ".join(f"{whole.classes[k]} {tally[0, k]:,} + {tally[1, k]:,}" for k in order)
    note = f"validation: {chosen.sum():,} of {len(whole):,} images, chosen by their content"
    note += f" (--val-fraction {fraction:g}); {'fewest: ' if few else ''}{listed}"
    val = whole.take(np.flatnonzero(chosen), left_out="", notes=())
    return whole.take(np.flatnonzero(~chosen), notes=(*whole.notes, shown(note))), val


def duplicates(train: ImageSet, val: ImageSet, search: str, world: World) -> list[str]:
    """A line on pictures that are in both sets, and one on those under several classes; all ranks call it together.

    Files of a size that no other has are not read. `search`: "always", "never", or "auto": where there are at most
    100,000 pictures whose sizes are known. Sets of another kind than encoded pictures are not searched.
    """
    if search == "never" or not isinstance(train, PictureSet) or not isinstance(val, PictureSet):
        return []
    unsized = train.source.stat(0)[0] is None
    if search == "auto" and (len(train) + len(val) > _AT_ONCE or unsized):
        return []
    world.status("starting: looking for pictures that come twice")
    sizes = np.concatenate([_sizes(each, world) for each in (train, val)])
    _, places, tally = np.unique(sizes, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(tally[places] > 1)  # samples of train, then those of val
    split = np.searchsorted(candidates, len(train))
    parts = [hashes(train, world, candidates[:split]), hashes(val, world, candidates[split:] - len(train))]
    groups = _groups(np.concatenate(parts), candidates)
    return [*_in_both(train, val, groups), *_under_several(train, val, groups)]


def _sizes(images: PictureSet, world: World) -> Array:
    """Bytes of each picture, int64 [n], 0 where that is not known; each rank asks for its part."""
    _require_same_list(images, world)
    sizes = np.zeros(len(images), np.int64)
    part = world.shard(len(images))
    for sample in range(part.start, part.stop):
        with images.naming(sample):
            sizes[sample] = images.source.stat(sample)[0] or 0
    world.sum(torch.from_numpy(sizes))
    return sizes


def _groups(digests: Array, samples: Ids) -> list[list[int]]:
    """Samples that have a digest in common, int64 [n, 2]."""
    order = np.lexsort((samples, digests[:, 1], digests[:, 0]))
    edges = np.flatnonzero((digests[order][1:] != digests[order][:-1]).any(axis=1)) + 1
    return [group.tolist() for group in np.split(samples[order], edges) if len(group) > 1]


def _in_both(train: PictureSet, val: PictureSet, groups: list[list[int]]) -> list[str]:
    first = len(train)
    pairs = sorted((sample - first, group[0]) for group in groups for sample in group if group[0] < first <= sample)
    if not pairs:
        return []
    listed = "; ".join(f"{val.source.where(k)} = {train.source.where(twin)}" for k, twin in pairs[:_SHOWN])
    return [
        f"note: {len(pairs):,} of {len(val):,} images to validate on are among those to train on as well, by their "
        f"content, so the accuracy flatters: {listed}{', ...' if len(pairs) > _SHOWN else ''}"
    ]


def _under_several(train: PictureSet, val: PictureSet, groups: list[list[int]]) -> list[str]:
    found = []
    for group in sorted(groups):
        by_class: dict[str, str] = {}
        for sample in group:
            images, k = (train, sample) if sample < len(train) else (val, sample - len(train))
            by_class.setdefault(label_name(images, int(images.labels[k])), images.source.where(k))
        if len(by_class) > 1:
            found.append(" and ".join(f"{path} ({name})" for name, path in sorted(by_class.items())))
    if not found:
        return []
    more = "; ..." if len(found) > _SHOWN else ""
    return [shown(f"note: {len(found):,} image(s) stand under several classes: {'; '.join(found[:_SHOWN])}{more}")]
