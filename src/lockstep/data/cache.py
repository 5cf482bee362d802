"""Pictures kept as they were decoded, in files of some hundred each, mapped by whoever reads them (`--cache`).

A block file is safetensors: `table`, int64 [n, 3] of height, width and checksum (a height of 0: can't be decoded), and
`pixels`, the pictures' uint8 [h, w, 3] one after the other, each filled up to 8 bytes. It gets its name when it is
whole.
"""

import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.data import decoding
from lockstep.data.decoding import HEIF_PACKAGE, decode
from lockstep.data.image_sets import Array, Ids, ImageSet, counts
from lockstep.data.picture_set import PictureSet, user_cache
from lockstep.distributed.files import atomic_write, named, write_error
from lockstep.distributed.output import for_people
from lockstep.distributed.proc import cores
from lockstep.distributed.world import World
from lockstep.errors import UserError, reason

AUTO = "auto"
_FEWEST, _MOST = 16, 512  # pictures a block: what a killed process loses, and how evenly the work is divided
_UNUSED_S = 30 * 86400.0  # after which `auto` removes a cache
_PART = 0.8  # of the free space, that a cache may take
_SHOWN = 5  # broken pictures, of all


@dataclass(frozen=True)
class Cache:
    """Where a set's pictures are kept: picture i in block i // each. Pickles as these few words."""

    folder: Path
    key: str  # of all that the pixels depend on
    count: int  # pictures
    each: int  # pictures a block
    pixels: bool = True  # False: sizes alone, to know what can be decoded

    @property
    def blocks(self) -> int:
        """Files of a whole cache."""
        return -(-self.count // self.each)

    def path(self, number: int) -> Path:
        """A block's file."""
        return self.folder / f"block-{number:06}.safetensors"

    def members(self, number: int) -> range:
        """The pictures of a block."""
        return range(number * self.each, min(self.count, (number + 1) * self.each))

    def fault(self, number: int) -> str:
        """Why a block's file can't be used; nothing where it can. Its head is read, and its size compared."""
        try:
            self.mapped(number)
        except FileNotFoundError:
            return "it is missing"
        except SafetensorError as error:
            return f"it is torn, or no file of a cache ({reason(error)})"
        except (OSError, ValueError) as error:
            return reason(error)
        return ""

    def mapped(self, number: int) -> tuple[Array, Array, Ids]:
        """A block's table, its pixels, which are mapped and not read, and where each picture begins.
        Raises OSError, ValueError, SafetensorError where it can't be read, or is torn, damaged or of another cache.
        """
        with safe_open(self.path(number), "pt") as file:
            name, _, digest = (file.metadata() or {}).get("block", "").rpartition(" ")
            if name != f"{self.key} {number}":
                raise ValueError("it is of another cache")
            table, pixels = file.get_tensor("table").numpy(), file.get_tensor("pixels").numpy()
        if digest != hashlib.sha256(table.tobytes()).hexdigest():
            raise ValueError("its table is damaged")
        return table, pixels, np.cumsum([0, *(-(-table[:, 0] * table[:, 1] * 3 // 8) * 8).tolist()])

    def picture(self, number: int) -> Tensor:
        """A picture's pixels, uint8 [3, h, w], as the decoder left them.
        Raises UserError where they are no longer what was written.
        """
        block, row = divmod(number, self.each)
        table, pixels, starts = _block(self, block)
        height, width, checksum = table[row].tolist()
        stored = pixels[starts[row] : starts[row + 1]]
        if not height or checksum_of(stored) != checksum:
            what = f"{self.path(block)}: picture {row} of it was damaged since it was kept"
            raise UserError(what, "Remove the file: what it holds is decoded again.")
        return torch.from_numpy(stored[: height * width * 3].reshape(height, width, 3)).permute(2, 0, 1)

    def write(self, number: int, pictures: Sequence[Tensor | None]) -> None:
        """Write a block, whole or not at all. pictures: uint8 [3, h, w], None for what can't be decoded. OSError."""
        table, stored = np.zeros((len(pictures), 3), "<i8"), [np.zeros(0, np.uint8)]
        for row, picture in enumerate(pictures):
            if picture is not None:
                flat = picture.permute(1, 2, 0).contiguous().numpy().reshape(-1)
                flat = np.concatenate([flat, np.zeros(-len(flat) % 8, np.uint8)])
                table[row] = (*picture.shape[1:], checksum_of(flat))
                stored += [flat] if self.pixels else []
        metadata = {"block": f"{self.key} {number} {hashlib.sha256(table.tobytes()).hexdigest()}"}
        tensors = {"table": torch.from_numpy(table), "pixels": torch.from_numpy(np.concatenate(stored))}
        with atomic_write(self.path(number)) as temporary:
            save_file(tensors, temporary, metadata)


def checksum_of(stored: Array) -> int:
    """The sum of words of 8 bytes, as int64: 8 us for 256 KiB, where SHA-256 takes 128."""
    return int(stored.view("<i8").sum())


@lru_cache(1 << 14)  # the kernel allows 65,530 maps
def _block(cache: Cache, number: int) -> tuple[Array, Array, Ids]:
    try:
        return cache.mapped(number)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{cache.path(number)} can't be read: {reason(error)}", "Start the run again.") from error


def key_of(images: PictureSet) -> str:
    """SHA-256 of what the kept pixels depend on: files with their sizes and times, decode size, and what decodes.
    Raises UserError for a file that is gone.
    """
    digest = hashlib.sha256(repr((images.decode_size, len(images), _decoder())).encode())
    for sample in range(len(images)):
        with images.naming(sample):
            size, changed, *_ = images.source.stat(sample)
        if not changed:  # kept inside something that the fingerprint knows
            digest.update(images.fingerprint.encode())
            break
        digest.update(repr((images.source.key(sample), size, changed)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _decoder() -> tuple[str, ...]:
    """What decodes here, and what it refuses: versions, our own code among them, the bound on its memory, and a digest
    of what they make of a picture, since processors differ as well.
    """
    y, x = np.mgrid[:120, :167]
    waves = np.stack([x * x + 3 * y, 5 * x + y * y, x * y], axis=2) // 16 % 256
    stored = io.BytesIO()
    Image.fromarray(waves.astype(np.uint8)).save(stored, "JPEG", quality=90)
    pixels = b"".join(decode(stored.getvalue(), short).numpy().tobytes() for short in (30, 111))
    versions = []
    for package in ("pillow", "torch", "torchcodec", HEIF_PACKAGE):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    own, bound = Path(decoding.__file__).read_bytes(), os.environ.get("LOCKSTEP_DECODE_MIB", "")
    return (*versions, bound, *(hashlib.sha256(data).hexdigest() for data in (own, pixels)))


def cache_in(folder: Path, images: PictureSet, key: str, pixels: bool = True) -> Cache:
    """The cache of a set below a folder, whether it is there or not."""
    count = len(images)
    each = max(min(_MOST, max(_FEWEST, count // 256)), -(-count // 4096))
    return Cache(folder / (key[:24] if pixels else f"{key[:24]}-sizes"), key, count, each, pixels)


def fill(images: PictureSet, cache: Cache, world: World) -> None:
    """Decode and write what is missing of a cache; all ranks call it together, each in its own folder or in one.

    A rank begins with its own part, and goes on with those of others from their ends: so whoever is done helps, on
    another machine that shares the folder too, and nobody has to ask who is at work.
    Raises UserError for a picture that can't be read from the disk, and where the system refuses to write.
    """
    first, after = (cache.blocks * rank // world.size for rank in (world.rank, world.rank + 1))
    due = time.monotonic() + 1
    order = [*range(first, after), *reversed([*range(after, cache.blocks), *range(first)])]
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        os.utime(cache.folder)  # it is in use: see _fits
        todo = {number: fault for number in order if (fault := cache.fault(number))}
        for number, fault in todo.items():
            if cache.path(number).exists() and world.local_rank == 0:
                note = f"note: {cache.path(number)}: {fault}; it is made again"
                print(for_people(note, sys.stderr), file=sys.stderr, flush=True)
        with ThreadPoolExecutor(max(1, cores() // world.local_size)) as pool:
            for number in todo:
                if cache.fault(number):  # not made by another one meanwhile
                    cache.write(number, [*pool.map(partial(_decoded, images), cache.members(number))])
                if world.rank == 0 and time.monotonic() > due:
                    due = time.monotonic() + 1
                    done = sum(not cache.fault(each) for each in range(cache.blocks)) * cache.each
                    world.status(f"starting: decoding the pictures of {images.name}: {done:,} of {cache.count:,}")
    except OSError as error:
        raise write_error(cache.folder, error, "the cache ") from error
    world.barrier()


def _decoded(images: PictureSet, sample: int) -> Tensor | None:
    """A picture's pixels; None for what is there and can't be decoded."""
    with images.naming(sample):
        data = images.source.read(sample)
    try:
        return decode(data, images.decode_size)
    except MemoryError:
        raise
    except Exception:  # whatever a decoder makes of a broken file; `PictureSet.fault` asks again for what it says
        return None


def keep(sets: tuple[ImageSet, ImageSet], where: str, skip_broken: bool, world: World) -> tuple[ImageSet, ImageSet]:
    """The sets with their pictures kept in `where` ("": nowhere), and without broken ones; all ranks call it together.

    Every picture is decoded once before training begins, by all ranks. So a broken one is known then: it ends the run,
    or with `skip_broken` it is left out, the same on any number of processes, as if its file were not there.
    Raises UserError for sets that are no files of pictures, broken ones, and a cache that doesn't fit.
    """
    train, val = sets
    if where == "ram":
        raise UserError("--cache ram: memory is a folder, too", "Give --cache /dev/shm/NAME, and remove it afterwards.")
    if not (isinstance(train, PictureSet) and isinstance(val, PictureSet)):
        flag = f"--cache {where}" if where else "--skip-broken"
        raise UserError(f"{flag}: {train.name} holds no picture files", "Leave it out.")
    folder = user_cache("pictures") if where in ("", AUTO) else named(where).absolute()
    keys, fits = ["", ""], True
    with world.first_on_host():
        if world.local_rank == 0:
            keys = [key_of(images) for images in (train, val)]
            caches = [cache_in(folder, images, key) for images, key in zip((train, val), keys, strict=True)]
            fits = bool(where) and _fits(where, caches, train.decode_size)
    keys, fits = world.gather(keys)[world.rank - world.local_rank], all(world.gather(fits))
    if not fits and not skip_broken:
        return sets
    caches = [cache_in(folder, images, key, fits) for images, key in zip((train, val), keys, strict=True)]
    return _kept(train, caches[0], skip_broken, world), _kept(val, caches[1], skip_broken, world)


def _fits(asked: str, caches: Sequence[Cache], decode_size: int) -> bool:
    """True where caches are there or fit, which is reported. "auto" does without where they don't; else UserError."""
    folder = caches[0].folder.parent
    for left in folder.glob("*/") if asked == AUTO else ():
        if time.time() - left.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(left, ignore_errors=True)
    missing = sum(len(each.members(k)) for each in caches for k in range(each.blocks) if each.fault(k))
    needed = missing * 4 * decode_size**2  # pictures of 4:3; smaller ones take less
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    text = f"up to {needed / 2**20:,.0f} MiB of pictures, and {folder} has room for {free / 2**20:,.0f}"
    fits = needed <= free * _PART
    if not fits and asked != AUTO:
        raise UserError(f"--cache {asked}: {text}", "Name another folder, or leave --cache out.")
    if needed:
        said = f"--cache: {text}{'' if fits else ': they are not kept'}"
        print(for_people(said, sys.stderr), file=sys.stderr, flush=True)
    return fits


def _kept(images: PictureSet, cache: Cache, skip_broken: bool, world: World) -> PictureSet:
    """One of the sets, its cache filled."""
    fill(images, cache, world)
    height = np.concatenate([cache.mapped(number)[0][:, 0] for number in range(cache.blocks)])
    broken, sound = np.flatnonzero(height == 0), np.flatnonzero(height)
    kept = replace(images, cache=cache) if cache.pixels else images
    if not len(broken):
        return kept
    names = ", ".join(images.source.where(sample) for sample in broken[:_SHOWN].tolist())
    names += f" and {len(broken) - _SHOWN:,} more" if len(broken) > _SHOWN else ""
    if not skip_broken:
        first = images.fault(int(broken[0])) or "it could a moment ago"
        what = f"{len(broken):,} of {len(images):,} pictures can't be decoded: {names}; the first one: {first}"
        raise UserError(what, "Replace or remove them, or leave them out with --skip-broken.")
    lost = np.flatnonzero((counts(images, images.labels) > 0) & (counts(images, images.labels[sound]) == 0))
    if len(lost):
        what = f"{images.name}: no picture of class {images.classes[lost[0]]} can be decoded"
        raise UserError(what, "Replace them, or remove the class from both sets.")
    note = f"note: --skip-broken leaves out {len(broken):,} of {len(images):,} pictures of {images.name}: {names}"
    return kept.take(sound, notes=(*images.notes, note))
