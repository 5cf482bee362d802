"""Published files: found, unpacked or downloaded, and verified; a file under its own name is always whole."""

import gzip
import hashlib
import http.client
import queue
import shutil
import socket
import tarfile
import tempfile
import threading
import time
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError

PROBE_SECONDS = 4.0  # for all mirrors together, so that a machine without a network hears of it at once
STALL_SECONDS = 30.0  # a download that sends nothing for this long has failed
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


def verify(path: Path, size: int, checksum: str, called: str = "") -> None:
    """Raise UserError where a file, `called` so or by its path, has not this size and checksum."""
    called = called or str(path)
    remedy = "Delete it and run again to have it downloaded, or put the published file in its place."
    found_size = path.stat().st_size
    if found_size != size:
        short = "short" if found_size < size else "too long"
        raise UserError(f"{called} is {short}: {found_size} bytes instead of {size}", remedy)
    algorithm = "md5" if len(checksum) == 32 else "sha256"
    with path.open("rb") as file:
        # told that this is no security matter, FIPS builds compute MD5 too
        found = hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
    if found != checksum:
        raise UserError(f"{called} is damaged: its {algorithm} is {found} instead of {checksum}", remedy)


def _complete(release: Release, root: Path, missing: Sequence[str]) -> None:
    folder = root / release.folder
    wanted = {package: names for package, (_, names) in release.packages.items() if set(names) & set(missing)}
    at_hand = {package: path for package in wanted for path in (folder / package, root / package) if path.is_file()}
    absent = [package for package in wanted if package not in at_hand]
    mirrors = _answering(release, root, missing, absent) if absent or not wanted else []
    with _writable(folder, release), tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
        for package, members in wanted.items():
            archive = at_hand.get(package) or _download(release, root, missing, package, mirrors, Path(scratch))
            names = [name for name in members if name in missing]
            _unpack(archive, names, Path(scratch))
            for name in names:
                verify(Path(scratch) / name, *release.files[name], f"{name} in {archive}")
            for name in names:  # same file system: a name appears with the whole file behind it
                (Path(scratch) / name).replace(folder / name)


@contextmanager
def _writable(folder: Path, release: Release) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
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
        raise UserError(
            f"{archive} cannot be unpacked: {error}",
            "Delete it and run again to have it downloaded, or put the published package in its place.",
        ) from error


def _answering(release: Release, root: Path, missing: Sequence[str], absent: Sequence[str]) -> list[str]:
    """The mirrors that answer for a package, in the release's order; UserError where none does within PROBE_SECONDS."""
    if not release.mirrors:
        raise UserError(
            f"{release.name}: {', '.join(missing)} missing from {root / release.folder}", "Install lockstep again."
        )
    answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for mirror in release.mirrors:
        # daemon threads: name look-up has no timeout of its own, and must not keep the process
        threading.Thread(target=_probe, args=(mirror, absent[0], answers), daemon=True).start()
    outcome: dict[str, str] = {}
    deadline = time.monotonic() + PROBE_SECONDS
    while len(outcome) < len(release.mirrors) and (left := deadline - time.monotonic()) > 0:
        try:
            mirror, reason = answers.get(timeout=left)
        except queue.Empty:
            break
        outcome[mirror] = reason
    if mirrors := [mirror for mirror in release.mirrors if outcome.get(mirror) == ""]:
        return mirrors
    reasons = {mirror: outcome.get(mirror, f"no answer in {PROBE_SECONDS:.0f} s") for mirror in release.mirrors}
    raise _unavailable(release, root, missing, reasons)


def _probe(mirror: str, package: str, answers: "queue.SimpleQueue[tuple[str, str]]") -> None:
    request = urllib.request.Request(mirror + package, method="HEAD", headers={"User-Agent": "lockstep"})
    try:
        with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
            answers.put((mirror, ""))
    except (OSError, http.client.HTTPException) as error:
        answers.put((mirror, str(getattr(error, "reason", "") or error)))


def _download(
    release: Release, root: Path, missing: Sequence[str], package: str, mirrors: Sequence[str], into: Path
) -> Path:
    from torchvision.datasets.utils import download_url  # a second to import, and seldom needed

    checksum, _ = release.packages[package]
    reasons: dict[str, str] = {}
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)  # torchvision's download takes no timeout
    try:
        for mirror in mirrors:
            try:
                download_url(mirror + package, into, package, checksum)
                return into / package
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                reasons[mirror] = str(error)
                (into / package).unlink(missing_ok=True)
    finally:
        socket.setdefaulttimeout(before)
    raise _unavailable(release, root, missing, reasons)


def _unavailable(release: Release, root: Path, missing: Sequence[str], reasons: Mapping[str, str]) -> UserError:
    folder = root / release.folder
    packages = [package for package, (_, names) in release.packages.items() if set(names) & set(missing)]
    tried = "; ".join(f"{mirror}: {reason}" for mirror, reason in reasons.items())
    return UserError(
        f"{release.name}: {', '.join(missing)} missing from {folder}, and not to be had from here ({tried})",
        f"On a machine with a network download {', '.join(packages)} from {release.mirrors[0]} and put "
        f"{'it' if len(packages) == 1 else 'them'}, packed or unpacked, into {folder}; or {_ELSEWHERE}, "
        f"the folder that holds {release.folder}.",
    )
