"""A cache is made: which pictures it is of, and every process of a run decoding what is missing."""

import fcntl
import hashlib
import io
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image, features
from torch import Tensor

from lockstep.data.cache import Cache
from lockstep.data.decoding import HEIF_PACKAGE, decode_shrunk
from lockstep.data.folder import FolderSet
from lockstep.errors import UserError
from lockstep.processes.files import write_error
from lockstep.processes.proc import cores
from lockstep.processes.world import World

_FEWEST, _MOST = 16, 512  # pictures a block: what a killed process loses, and how evenly the work is shared
_ROUND_S, _WORTH_S = 5.0, 2.0  # the ranks tell each other how far they are; a build that takes less is not told
_BUSY_S = 0.02


def key_of(images: FolderSet, pixels: bool = True) -> bytes:
    """SHA-256 of what the kept pixels depend on: files with their sizes and times, decode size, and what decodes.

    Raises:
        UserError: for a file that is gone.
    """
    digest = hashlib.sha256(repr((images.decode_size, len(images), pixels, _decoder())).encode())
    for sample in range(len(images)):
        try:
            stated = images.stat(sample)
        except OSError as error:
            raise UserError(f"{images.where(sample)}: {error.strerror}", "Put it back.") from error
        if stated is None:  # kept inside a file that the fingerprint knows
            digest.update(images.fingerprint.encode())
            break
        digest.update(repr((images.key(sample), stated.st_size, stated.st_mtime_ns)).encode("utf-8", "surrogatepass"))
    return digest.digest()


def _decoder() -> tuple[str, ...]:
    """What decodes here: versions, and a digest of what they make of a picture, since processors differ as well."""
    y, x = np.mgrid[:120, :167]
    waves = np.stack([x * x + 3 * y, 5 * x + y * y, x * y], axis=2) // 16 % 256
    stored = io.BytesIO()
    Image.fromarray(waves.astype(np.uint8)).save(stored, "JPEG", quality=90)
    made = b"".join(decode_shrunk(stored.getvalue(), short).numpy().tobytes() for short in (30, 111))
    libraries = [str(features.version(name)) for name in ("libjpeg_turbo", "jpg", "webp", "avif")]
    heif = version(HEIF_PACKAGE) if find_spec("pillow_heif") else ""
    versions = (PIL.__version__, heif, *libraries, torch.__version__, torchvision.__version__)
    return (*versions, hashlib.sha256(made).hexdigest())


def cache_in(folder: Path, images: FolderSet, key: bytes, pixels: bool = True) -> Cache:
    """The cache of a set below a folder, whether it is there or not. The set's size alone says how it is cut."""
    count = len(images)
    each = max(min(_MOST, max(_FEWEST, count // 256)), -(-count // 4096))
    return Cache(folder / key.hex()[:24], key, count, each, pixels)


def fill(images: FolderSet, cache: Cache, world: World, durable: bool) -> None:
    """Decode and write what is missing of a cache; all ranks call it together, each in its own folder or in one.

    What another process or machine works on at the moment is left to it, as long as it lives.

    Raises:
        UserError: for a picture that can't be read from the disk, and where the system refuses to write.
    """
    try:
        cache.folder.mkdir(parents=True, exist_ok=True)
        first = cache.blocks * world.rank // world.size
        order = [*range(first, cache.blocks), *range(first)]
        todo = deque(number for number in order if _wanting(cache, number, world))
        missing = len(todo)
        threads = max(1, cores() // world.local_size)
        with _claims(cache) as claim, ThreadPoolExecutor(threads) as pool, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # here, since threads can't do so each by itself
            decode = partial(pool.map, partial(_decoded, images))
            begun = time.monotonic()
            told = begun
            while True:
                until = time.monotonic() + min(_ROUND_S, max(_BUSY_S, (time.monotonic() - begun) / 8))
                while todo and time.monotonic() < until:
                    _work(cache, todo, claim, decode, durable)
                todo = deque(number for number in todo if cache.fault(number))
                left = world.gather(len(todo))
                if not any(left):
                    return
                if world.rank == 0 and time.monotonic() - told > _WORTH_S * 2:
                    told = time.monotonic()
                    _tell(images, cache, missing, len(todo), told - begun)
    except OSError as error:
        raise write_error(cache.folder, error, "the cache ") from error


def _wanting(cache: Cache, number: int, world: World) -> bool:
    fault = cache.fault(number)
    if fault and cache.path(number).exists() and world.local_rank == 0:
        print(f"note: {cache.path(number)}: {fault}; it is made again", file=sys.stderr, flush=True)
    return bool(fault)


def _work(
    cache: Cache,
    todo: deque[int],
    claim: Callable[[int, bool], bool],
    decode: Callable[[range], Iterator[Tensor | None]],
    durable: bool,
) -> None:
    """Make the next block, unless somebody else has it, or is at it."""
    number = todo.popleft()
    if not claim(number, True):
        todo.append(number)
        time.sleep(_BUSY_S)
        return
    try:
        if cache.fault(number):
            for left in cache.folder.glob(f".{cache.path(number).name}.*.tmp"):
                left.unlink(missing_ok=True)  # of one who was killed
            cache.write(number, [*decode(cache.members(number))], durable)
    finally:
        claim(number, False)


@contextmanager
def _claims(cache: Cache) -> Iterator[Callable[[int, bool], bool]]:
    """A function that takes a block (True) or gives it back; False where another process has it.

    A lock on one byte of a file for each block: the kernel lets go of it when the process ends, over NFS as well. On a
    file system without locks two may make the same block, which costs time alone.
    """
    descriptor = os.open(cache.folder / "blocks.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)

    def claim(number: int, take: bool) -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if take else fcntl.LOCK_UN, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    try:
        yield claim
    finally:
        os.close(descriptor)


def _decoded(images: FolderSet, sample: int) -> Tensor | None:
    """A picture's pixels; None for what is there and can't be decoded."""
    try:
        data = images.encoded(sample)
    except OSError as error:
        raise UserError(f"{images.where(sample)}: {error.strerror}", "Put it back, or remove it.") from error
    try:
        return images.pixels(data)
    except MemoryError:
        raise
    except Exception:  # whatever a decoder makes of a broken file; `FolderSet.fault` asks again for what it says
        return None


def _tell(images: FolderSet, cache: Cache, missing: int, left: int, seconds: float) -> None:
    """How far this host is, in blocks, on standard error."""
    done = min(cache.count, (cache.blocks - left) * cache.each)
    time_left = f", {seconds / (missing - left) * left:,.0f} s left" if missing > left else ""
    what = "keeping" if cache.pixels else "looking through"
    print(f"{what} the pictures of {images.name}: {done:,} of {cache.count:,}{time_left}", file=sys.stderr, flush=True)
