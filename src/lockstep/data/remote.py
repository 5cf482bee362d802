"""Files of this machine and objects behind an address (http, s3, gs, ... through fsspec), read by ranges of bytes.

Every read of an address has a deadline and is tried a few times; each try that failed is printed, and the last one is
an error. What was read and checked may be kept in files of this machine, which the ranks share.
"""

import fcntl
import glob
import io
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from lockstep.distributed.files import atomic_write
from lockstep.errors import UserError, is_url, reason, redacted, refusal, shown

TRIES = 6  # of one read; the waits between them grow from 0.2 s to 3.2 s
_FIRST_WAIT_S = 0.2
_DEADLINE_S = float(os.environ.get("LOCKSTEP_READ_TIMEOUT") or 30.0)  # of one try
_CHUNK = 8 << 20  # bytes of one range, where a whole object is read
_LOCKS = 1024
_REFUSED = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError)  # another try would not help
_T = TypeVar("_T")


def reached(url: str, **options: Any) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path there. Raises UserError where nothing here can reach it."""
    try:
        from fsspec.core import url_to_fs

        if url.startswith(("s3://", "s3a://")):  # s3fs tries each request 5 times itself
            options["config_kwargs"] = {"retries": {"total_max_attempts": 1}}
        return url_to_fs(url, **options)  # type: ignore[no-any-return]
    except Exception as error:  # any type: each scheme has a library of its own
        remedy = "For https and S3: pip install 'lockstep-torch[remote]'; for others, what fsspec has for them."
        raise UserError(f"{url} can't be reached: {refusal(error)}", remedy) from error


@lru_cache(16)
def _file_system(protocol: str, pid: int) -> Any:  # noqa: ARG001  # a forked process needs one of its own
    return reached(f"{protocol}://", use_listings_cache=False)[0]  # what changes meanwhile is to be seen


def _call(url: str, method: str, *args: Any, **kwargs: Any) -> Any:
    system = _file_system(url.partition("://")[0], os.getpid())
    if system.async_impl:
        kwargs["timeout"] = _DEADLINE_S
    return getattr(system, method)(*args, **kwargs)


def _say(note: str) -> None:
    sys.stderr.write(f"note: {note}\n")  # one call, for threads


def persist(what: str, url: str, once: Callable[[], _T], note: Callable[[str], object] = _say) -> _T:
    """What `once` returns, which is tried again where it raises; `note` gets a line on each such try.
    Raises UserError after the last one, or where another would not help, and FileExistsError at once.
    """
    for attempt in range(TRIES):
        try:
            return once()
        except (UserError, FileExistsError):
            raise
        except Exception as error:  # of the network, of a store's library: no common type
            text = shown(redacted(f"{url}: {what}: {_text(error)}"))
            answered = error.__cause__ is None or hasattr(error.__cause__, "operation_name")  # that is S3's own answer
            if isinstance(error, _REFUSED) and (answered or _status(error) in (401, 403, 404)):
                raise UserError(text, "Is the address right, and may this user read it?") from error
            if attempt == TRIES - 1:
                remedy = (
                    "Is the store reachable, and unchanged since it was indexed? A run that is started again goes on."
                )
                raise UserError(f"{text} ({TRIES} tries)", remedy) from error
            note(f"{text}; try {attempt + 2} of {TRIES} follows")
            time.sleep(_FIRST_WAIT_S * 2**attempt * random.Random(f"{url} {attempt} {os.getpid()}").uniform(0.5, 1))
    raise AssertionError("unreachable")


def _status(error: Exception) -> int | None:
    """The status of an HTTP answer that is behind an error: fsspec calls some of them FileNotFoundError."""
    return getattr(error, "status", None) or getattr(error.__cause__, "status", None)


def _text(error: Exception) -> str:
    if status := _status(error):
        return f"HTTP {status}"
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {reason(error)}" if str(error) else type(cause).__name__


def stat(url: str) -> tuple[int, str]:
    """Bytes, and what changes with the content: an ETag, or a time; "" where the store has none. Raises UserError."""
    if not is_url(url):
        try:
            found = Path(url).stat()
        except OSError as error:
            raise UserError(shown(f"{url}: {error.strerror}"), "Put it back, or leave it out of the list.") from error
        return found.st_size, f"mtime {found.st_mtime_ns}"
    info = persist("its size", url, lambda: _call(url, "info", url))
    marks = (info.get(name) for name in ("ETag", "etag", "md5Hash", "generation", "LastModified", "Last-Modified"))
    if not info.get("size"):
        raise UserError(f"{url}: the store does not say how many bytes it has", "Shards need a store with sizes.")
    return int(info["size"]), str(next(filter(None, marks), ""))


def read_range(url: str, start: int, size: int, sound: Callable[[bytes], bytes] = bytes) -> bytes:
    """These bytes of a file or object, as `sound` returns them, whose OSError is a reason to try again.
    Raises UserError, naming address, range and what happened.
    """

    def once() -> bytes:
        if is_url(url):
            data: bytes = _call(url, "cat_file", url, start=start, end=start + size)
        else:
            with Path(url).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, start)
        if len(data) != size:
            raise OSError(f"{len(data):,} bytes came instead of {size:,}")
        return sound(data)

    what = f"bytes {start}-{start + size - 1}"
    if is_url(url):
        return persist(what, url, once)
    try:
        return once()
    except OSError as error:
        raise UserError(shown(f"{url}: {what}: {refusal(error)}"), "Put it back.") from error


class Stream:
    """A file or object from its beginning to its end, in large ranges.

    `count`: bytes read so far, of which the last `zeros` are 0.
    """

    def __init__(self, url: str, size: int) -> None:
        self.url, self.size, self.count, self.zeros, self._held = url, size, 0, 0, io.BytesIO()

    def read(self, size: int) -> bytes:
        """The next bytes, as many of them as the range at hand has; none at the end."""
        if not (data := self._held.read(size)) and self.count < self.size:
            self._held = io.BytesIO(read_range(self.url, self.count, min(_CHUNK, self.size - self.count)))
            data = self._held.read(size)
        kept = len(data.rstrip(b"\0"))
        self.zeros = len(data) - kept if kept else self.zeros + len(data)
        self.count += len(data)
        return data


def expand_braces(text: str) -> list[str]:
    """Each text that a pattern with {000..012} or {a,b} stands for, in its order."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}|\{([^{}]*,[^{}]*)\}", text)
    if found is None:
        return [text]
    if found[3] is not None:
        parts = found[3].split(",")
    else:
        first, last, width = int(found[1]), int(found[2]), len(found[1])
        parts = [f"{number:0{width}}" for number in range(first, last + 1)]
    rest = expand_braces(text[found.end() :])
    return [text[: found.start()] + part + after for part in parts for after in rest]


def list_files(url: str) -> list[str]:
    """What a pattern with *, or a folder, has: whole paths or addresses, sorted. Empty where there is nothing."""
    if not is_url(url):
        if glob.has_magic(url):
            return sorted(glob.glob(url))  # noqa: PTH207  # the pattern holds its folder
        return sorted(str(path) for path in Path(url).iterdir()) if Path(url).is_dir() else []
    protocol = url.partition("://")[0]
    method = "glob" if glob.has_magic(url) else "ls"
    try:
        found = persist("its list", url, lambda: _call(url, method, url, detail=False))
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    return sorted(each.rstrip("/") if is_url(each) else f"{protocol}://{each.rstrip('/')}" for each in found)


@dataclass(frozen=True)
class PieceCache:
    """Pieces of objects, checked before they are written, in files of this machine: whole ones under a final name.

    `limit`: bytes that they may take together; who writes removes those that were used least recently.
    """

    folder: Path
    limit: int

    def read(self, name: str, start: int, size: int, fetch: Callable[[], bytes]) -> bytes:
        """Bytes of a piece, which `fetch` reads from the store where it is not kept; one process at a time does."""
        if (data := self._kept(name, start, size)) is None:
            with self._lock(name):
                if (data := self._kept(name, start, size)) is None:
                    self._keep(name, whole := fetch())
                    data = whole[start : start + size]
        return data

    def fill(self, name: str, fetch: Callable[[], bytes]) -> None:
        """Have a piece at hand for later, unless another process is about to read it."""
        with suppress(BlockingIOError), self._lock(name, fcntl.LOCK_NB):
            if not self._path(name).exists():
                self._keep(name, fetch())

    def drop(self, name: str) -> None:
        """Remove a piece."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _kept(self, name: str, start: int, size: int) -> bytes | None:
        try:
            with self._path(name).open("rb", buffering=0) as file:
                os.utime(file.fileno())
                return os.pread(file.fileno(), size, start)
        except OSError:
            return None  # it is not there, or was removed just now: it is fetched

    @contextmanager
    def _lock(self, name: str, flags: int = 0) -> Iterator[None]:
        """Hold a piece for this process: the kernel lets go of it when that is killed. Several pieces share a lock."""
        (self.folder / "locks").mkdir(parents=True, exist_ok=True)
        path = self.folder / "locks" / str(int(name[:8], 16) % _LOCKS)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | flags)
            yield

    def _keep(self, name: str, data: bytes) -> None:
        path = self._path(name)
        try:
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path, durable=False) as temporary:
                temporary.write_bytes(data)
            with (self.folder / "written").open("ab") as tally:
                tally.write(b"\0" * (len(data) >> 16))  # a byte for 64 KiB since the last look
                due = tally.tell() << 16 > self.limit // 16
        except OSError as error:
            print(f"note: {self.folder} keeps nothing of {name[:8]}: {error.strerror}", file=sys.stderr, flush=True)
            return
        if due:
            self._trim()

    def _trim(self) -> None:
        """Remove what was used least recently, until a tenth of the limit is free."""
        os.truncate(self.folder / "written", 0)
        found = []
        for path in self.folder.glob("??/*"):
            with suppress(FileNotFoundError):
                held = path.stat()
                found.append((held.st_mtime_ns, held.st_size, path))
        excess = sum(size for _, size, _ in found) - self.limit * 9 // 10
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
