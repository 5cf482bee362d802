"""Sets whose pictures are kept as they were decoded, and without those that can't be."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.data.arrays import ImageSet
from lockstep.data.cache import Cache
from lockstep.data.cache_build import cache_in, fill, key_of
from lockstep.data.cache_place import choose, kept_below, memory, use
from lockstep.data.folder import FolderSet
from lockstep.data.label_sets import counts
from lockstep.errors import UserError
from lockstep.processes.world import World

_NAMED = 5  # broken pictures, of all


def keep(sets: tuple[ImageSet, ImageSet], where: str, skip_broken: bool, world: World) -> tuple[ImageSet, ImageSet]:
    """The sets with their pictures kept in `where` ("": nowhere), and without broken ones; all ranks call it together.

    Every picture is decoded once before training begins, by all ranks. So a broken one is known then: it ends the run,
    or with `skip_broken` it is left out, the same on any number of processes, as if its file were not there.

    Raises:
        UserError: for sets that are no files of pictures, broken ones, and a cache that doesn't fit.
    """
    train, val = sets
    if not (isinstance(train, FolderSet) and isinstance(val, FolderSet)):
        flag = f"--cache {where}" if where else "--skip-broken"
        raise UserError(f"{flag}: {train.name} holds no picture files", "Leave it out.")
    plan = _plan((train, val), where, skip_broken) if world.local_rank == 0 else []
    plan = world.gather(plan)[world.rank - world.local_rank]  # what this host's first rank found
    if not plan:
        return sets
    folder, pixels, *keys = plan
    caches = [
        cache_in(Path(folder), images, bytes.fromhex(key), pixels == "pixels")
        for images, key in zip((train, val), keys, strict=True)
    ]
    return _kept(train, caches[0], skip_broken, world), _kept(val, caches[1], skip_broken, world)


def _plan(sets: tuple[FolderSet, FolderSet], where: str, skip_broken: bool) -> list[str]:
    """The folder of this host's caches, whether they hold pixels or sizes alone, and their keys; none: no caches."""
    keys = tuple(key_of(images) for images in sets)
    if where and (folder := choose(where, sets, keys)):
        return [folder, "pixels", *(key.hex() for key in keys)]
    if skip_broken:
        return [str(kept_below()), "sizes", *(key_of(images, pixels=False).hex() for images in sets)]
    return []


def _kept(images: FolderSet, cache: Cache, skip_broken: bool, world: World) -> FolderSet:
    """One of the sets, its cache filled."""
    in_memory = cache.folder.parent == memory()
    if in_memory:
        use(cache.folder)
    fill(images, cache, world, durable=not in_memory)
    height = cache.sizes()[:, 0]
    broken, sound = np.flatnonzero(height == 0), np.flatnonzero(height)
    kept = replace(images, cache=cache) if cache.pixels else images
    if not len(broken):
        return kept
    names = ", ".join(images.named(sample) for sample in broken[:_NAMED].tolist())
    names += f" and {len(broken) - _NAMED:,} more" if len(broken) > _NAMED else ""
    if not skip_broken:
        raise UserError(
            f"{len(broken):,} of {len(images):,} pictures can't be decoded: {names}; the first one: "
            f"{images.fault(int(broken[0])) or 'it could a moment ago'}",
            "Replace or remove them, or leave them out with --skip-broken.",
        )
    lost = np.flatnonzero((counts(images, images.labels) > 0) & (counts(images, images.labels[sound]) == 0))
    if len(lost):
        raise UserError(
            f"{images.name}: no picture of class {images.classes[lost[0]]} can be decoded",
            "Replace them, or remove the class from both sets.",
        )
    note = f"note: --skip-broken leaves out {len(broken):,} of {len(images):,} pictures of {images.name}: {names}"
    return kept.taking(sound, notes=(*images.notes, note))
