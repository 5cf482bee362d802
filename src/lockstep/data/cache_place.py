"""Where a cache lies, whether it fits there, and what becomes of one in memory."""

import atexit
import fcntl
import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from lockstep.data.cache import Cache
from lockstep.data.cache_build import cache_in
from lockstep.data.decoding import opened, short_side_to
from lockstep.data.folder import FolderSet
from lockstep.errors import UserError

RAM, AUTO = "ram", "auto"
_SHARED = Path("/dev/shm")  # files in memory, which all processes of a machine see
_LOOKED_AT = 64  # pictures, whose sizes say how large a cache gets
_OF_MEMORY, _OF_DISK = 0.5, 0.8  # of what is free, that "auto" takes


def memory() -> Path:
    """This user's folder in memory, whether it is there or not."""
    return _SHARED / f"lockstep-pictures-{os.getuid()}"


def _made_memory() -> Path:
    """The same, made. Raises UserError where the system has none."""
    folder = memory()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(f"--cache ram: {_SHARED} can't be written: {error.strerror}", "Use --cache DIR.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise UserError(f"--cache ram: {folder} is not this user's alone", "Remove it, or use --cache DIR.")
    return folder


def kept_below() -> Path:
    """~/.cache/lockstep/pictures, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "lockstep" / "pictures"


def estimate(images: FolderSet, cache: Cache) -> int:
    """About the bytes that a cache has yet to write, from the sizes of some pictures spread over the set."""
    missing = sum(bool(cache.fault(number)) for number in range(cache.blocks))
    if not missing:
        return 0
    sizes = []
    for sample in np.linspace(0, len(images) - 1, min(len(images), _LOOKED_AT)).astype(int).tolist():
        with suppress(Exception):  # a broken one takes no room; it is named when it is decoded
            head = opened(images.encoded(sample))
            height, width = short_side_to(images.decode_size, head.height, head.width)
            sizes.append(height * width * 3 + 32)
    return round(float(np.mean(sizes or [0])) * cache.count * missing / cache.blocks)


def choose(asked: str, sets: tuple[FolderSet, ...], keys: tuple[bytes, ...]) -> str:
    """The folder of the caches of some sets; "" for none, where `auto` finds no place. Told on standard error.

    Raises:
        UserError: where they don't fit.
    """
    if asked == AUTO:
        return _fitting(sets, keys)
    folder = _made_memory() if asked == RAM else Path(asked).expanduser().absolute()
    if asked == RAM:
        sweep(folder, keys)
    needed, free = _needed(folder, sets, keys), _free(folder)
    if needed > free:
        raise UserError(
            f"--cache {asked}: the pictures take about {_bytes(needed)}, and {folder} has room for {_bytes(free)}",
            "Name another folder, use a smaller --decode-size, or leave --cache out.",
        )
    if needed:
        _say(f"about {_bytes(needed)} of pictures are kept in {folder}, which has room for {_bytes(free)}")
    return str(folder)


def _fitting(sets: tuple[FolderSet, ...], keys: tuple[bytes, ...]) -> str:
    disk = kept_below()
    needed = _needed(disk, sets, keys)
    if not needed:
        return str(disk)
    with suppress(UserError):  # no such memory here
        ram = _made_memory()
        sweep(ram, keys)
        if _needed(ram, sets, keys) <= _free(ram) * _OF_MEMORY:
            _say(f"about {_bytes(needed)} of pictures are kept in memory, {ram}")
            return str(ram)
    if needed <= _free(disk) * _OF_DISK:
        _say(f"about {_bytes(needed)} of pictures are kept in {disk}")
        return str(disk)
    _say(f"about {_bytes(needed)} of pictures fit neither in memory nor in {disk}: they are not kept")
    return ""


def _needed(folder: Path, sets: tuple[FolderSet, ...], keys: tuple[bytes, ...]) -> int:
    return sum(estimate(images, cache_in(folder, images, key)) for images, key in zip(sets, keys, strict=True))


def _free(folder: Path) -> int:
    """Bytes that may be written there."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    return min(free, psutil.virtual_memory().available) if folder.is_relative_to(_SHARED) else free


def _bytes(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _say(text: str) -> None:
    print(f"--cache: {text}", file=sys.stderr, flush=True)


def use(folder: Path) -> None:
    """Hold a cache in memory until this process ends; the last of those who do so removes it."""
    while True:
        with suppress(FileNotFoundError):  # somebody has just removed it
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), (folder / "users.lock").stat()):
                    break
            os.close(descriptor)
    atexit.register(_leave, folder, descriptor)


def _leave(folder: Path, descriptor: int) -> None:
    """Give up a hold, and remove what nobody holds."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


def sweep(below: Path, keys: tuple[bytes, ...]) -> None:
    """Remove what processes that were killed left in memory, but for the caches of these keys."""
    wanted = {key.hex()[:24] for key in keys}
    for folder in below.iterdir():
        if folder.name not in wanted:
            with suppress(OSError):  # its user is just leaving
                _leave(folder, os.open(folder / "users.lock", os.O_RDWR | os.O_NOFOLLOW))
