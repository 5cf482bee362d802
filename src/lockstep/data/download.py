"""Published files: found, unpacked or downloaded, and verified; a file under its own name is always whole."""

import gzip
import hashlib
import http.client
import queue
import shutil
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

PROBE_SECONDS = 4.0  # for all mirrors together, so that a machine without a network hears of it at once
STALL_SECONDS = 30.0  # a download that sends nothing for this long has failed
REPLACE = "Delete it and run again to have it downloaded, or put the published file in its place."
_ELSEWHERE = "name another folder with --data-dir DIR or the environment's LOCKSTEP_DATA"


@dataclass(frozen=True)
class Release:
    """The files of a published data set, and the packages that they come in.

    files: name -> (bytes, checksum); packages: name -> (checksum, names of the files in it); each mirror + a package's
    name is an address. A checksum is hexadecimal, MD5 (32 digits) or SHA-256 (64). Packages are .gz or .tar.gz.
    """

    name: str
    folder: str  # below the data folder
    files: Mapping[str, tuple[int, str]]
    packages: Mapping[str, tuple[str, tuple[str, ...]]]
    mirrors: tuple[str, ...]


def ensure(release: Release, root: Path) -> None:
    """Have every file of the release whole in `root / release.folder`; one process per host calls this.

    A missing file is unpacked from its package where that lies in the folder or in `root`, else downloaded.

    Raises:
        UserError: for a damaged file, a folder that cannot be written, or files that cannot be had from here.
    """
    folder = root / release.folder
    try:
        missing = [name for name in release.files if not (folder / name).is_file()]
        if missing:
            _complete(release, root, missing)
        for name in release.files:
            if name not in missing:  # the others were verified before they got their names
                verify(folder / name, *release.files[name])
    except OSError as error:
        raise UserError(
            f"{release.name}: cannot read its files in {folder}: {error}",
            f"Give this user the right to read there, or {_ELSEWHERE}.",
        ) from error


def verify(path: Path, size: int | None, checksum: str, called: str = "") -> None:
    """Raise UserError where a file, `called` so or by its path, has not this size (None: any) and checksum.

    Of a SHA-256 its beginning will do.
    """
    called = called or str(path)
    found_size = path.stat().st_size
    if size is not None and found_size != size:
        short = "short" if found_size < size else "too long"
        raise UserError(f"{called} is {short}: {found_size} bytes instead of {size}", REPLACE)
    algorithm = "md5" if len(checksum) == 32 else "sha256"
    with path.open("rb") as file:
        # FIPS builds compute MD5 only where it is marked as no security matter
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if not found.startswith(checksum):
        raise UserError(f"{called} is damaged: its {algorithm} is {found} instead of {checksum}", REPLACE)


def _complete(release: Release, root: Path, missing: Sequence[str]) -> None:
    folder = root / release.folder
    wanted = {package: names for package, (_, names) in release.packages.items() if set(names) & set(missing)}
    at_hand = {package: path for package in wanted for path in (folder / package, root / package) if path.is_file()}
    absent = [package for package in wanted if package not in at_hand]
    reasons = _reach(release.mirrors, absent[0]) if absent else {}
    mirrors = [mirror for mirror, reason in reasons.items() if not reason]
    if not mirrors and (absent or not wanted):
        raise _unavailable(release, root, missing, reasons)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            for package, members in wanted.items():
                archive = at_hand.get(package) or Path(scratch, package)
                if package in absent and (reasons := _download(mirrors, archive, release.packages[package][0])):
                    raise _unavailable(release, root, missing, reasons)
                names = [name for name in members if name in missing]
                _unpack(archive, names, Path(scratch))
                for name in names:
                    verify(Path(scratch) / name, *release.files[name], f"{name} in {archive}")
                for name in names:  # same file system: a name appears with the whole file behind it
                    (Path(scratch) / name).replace(folder / name)
    except OSError as error:
        raise UserError(
            f"{release.name}: cannot write its files to {folder}: {error}",
            f"Give this user the right to write there and enough space, or {_ELSEWHERE}.",
        ) from error


def _unpack(archive: Path, names: Sequence[str], into: Path) -> None:
    """Write the named files of a .tar.gz (in whatever folder of it), or the one that a .gz holds, below `into`."""
    try:
        if archive.name.endswith(".tar.gz"):
            left = set(names)
            with tarfile.open(archive, "r|gz") as tar:  # one pass
                for member in tar:
                    if (name := Path(member.name).name) in left and (source := tar.extractfile(member)):
                        with (into / name).open("wb") as out:
                            shutil.copyfileobj(source, out, 1 << 20)
                        left.remove(name)
            if left:
                raise EOFError(f"it has no {', '.join(sorted(left))}")
        else:
            with gzip.open(archive, "rb") as packed, (into / names[0]).open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, as a full disk; a damaged package has no errno
        raise UserError(f"{archive} cannot be unpacked: {error}", REPLACE) from error


def unreachable(server: str) -> str:
    """Why a server does not answer within PROBE_SECONDS; empty where it does, be it with an error."""
    reason = _reach([server], "", refusals=False)[server]
    return f"{server}: {reason}" if reason else ""


def _reach(mirrors: Sequence[str], package: str, refusals: bool = True) -> dict[str, str]:
    """Mirror -> why it does not answer for a package within PROBE_SECONDS, empty where it does."""
    answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def probe(mirror: str) -> None:
        try:
            with _opened(mirror + package, PROBE_SECONDS, "HEAD"):
                answers.put((mirror, ""))
        except urllib.error.HTTPError as error:
            answers.put((mirror, str(error.reason) if refusals else ""))
        except (OSError, http.client.HTTPException) as error:
            answers.put((mirror, str(getattr(error, "reason", "") or error)))

    for mirror in mirrors:
        # daemon threads: name look-up has no timeout of its own, and must not keep the process
        threading.Thread(target=probe, args=(mirror,), daemon=True).start()
    reasons = dict.fromkeys(mirrors, f"no answer in {PROBE_SECONDS:.0f} s")
    deadline = time.monotonic() + PROBE_SECONDS
    with suppress(queue.Empty):
        for _ in mirrors:
            mirror, reasons[mirror] = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    return reasons


def _opened(address: str, timeout: float, method: str = "GET") -> Any:
    """The server's answer. `timeout`: seconds without a byte, of this connection."""
    request = urllib.request.Request(address, method=method, headers={"User-Agent": "lockstep"})
    return urllib.request.urlopen(request, timeout=timeout)


def _download(mirrors: Sequence[str], path: Path, checksum: str) -> dict[str, str]:
    """Download a package, named as its file, from the first mirror that has it whole; else mirror -> why it has not."""
    from rich.console import Console
    from rich.progress import wrap_file

    reasons: dict[str, str] = {}
    for mirror in mirrors:
        try:
            with _opened(mirror + path.name, STALL_SECONDS) as answer, path.open("wb") as out:
                size = int(answer.headers.get("Content-Length", 0))
                with wrap_file(answer, size, description=path.name, console=Console(stderr=True)) as source:
                    shutil.copyfileobj(source, out, 1 << 20)
            verify(path, None, checksum)
            return {}
        except (OSError, http.client.HTTPException, UserError) as error:
            reasons[mirror] = str(error)
    return reasons


def fetch(url: str, path: Path, checksum: str) -> str:
    """Download a single file to its place, where it appears whole; returns why that failed, empty where it didn't.

    `checksum`: how its SHA-256 begins.
    """
    server, _, name = url.rpartition("/")
    if reason := _reach([f"{server}/"], name)[f"{server}/"]:
        return reason
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as scratch:
            whole = Path(scratch, name)
            if failed := _download([f"{server}/"], whole, checksum):
                return next(iter(failed.values()))
            whole.replace(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _unavailable(release: Release, root: Path, missing: Sequence[str], reasons: Mapping[str, str]) -> UserError:
    folder = root / release.folder
    message = f"{release.name}: {', '.join(missing)} missing from {folder}"
    if not release.mirrors:
        return UserError(message, "Install lockstep again.")
    packages = [package for package, (_, names) in release.packages.items() if set(names) & set(missing)]
    tried = "; ".join(f"{mirror}: {reason}" for mirror, reason in reasons.items())
    return UserError(
        f"{message}, and not to be had from here ({tried})",
        f"On a machine with a network download {', '.join(packages)} from {release.mirrors[0]} and put "
        f"{'it' if len(packages) == 1 else 'them'}, packed or unpacked, into {folder}; or {_ELSEWHERE}, "
        f"the folder that holds {release.folder}.",
    )
