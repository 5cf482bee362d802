"""A run in a store that fsspec reaches, as `--out s3://bucket/run`: fetched when it starts, mirrored while it goes on.

The run works in a folder of this machine. Threads of rank 0 upload what is finished there and renew the run's claim to
the store. A checkpoint's manifest goes last: a checkpoint without one is torn, and ignored. Credentials are found by
the store's own library, in the environment or its settings; nothing here sees them.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from lockstep.checkpoint.format import MANIFEST, Damaged, Manifest
from lockstep.checkpoint.restore import newest, verify
from lockstep.checkpoint.store import list_checkpoints
from lockstep.checkpoint.weights import read_metadata
from lockstep.data.picture_set import user_cache
from lockstep.data.remote import persist, reached
from lockstep.distributed.files import LOCK, atomic_write, hold, write_json, writer, writing
from lockstep.distributed.output import status
from lockstep.distributed.resize import REQUEST
from lockstep.errors import UserError, require_no_secrets
from lockstep.monitoring.journal import JOURNAL

REMOTE = "remote.json"  # in the local folder: the address, and by which id this folder claims it
LEASE_S, RENEW_S = 60.0, 15.0  # a claim that nobody renews for so long is free; a living run renews it so often
_LOOK_S = 1.0  # between two looks at the local folder, which cost a listing each
_RETRY_S = 60.0  # after an upload was given up, where no new checkpoint comes earlier
_LAST_UPLOAD_S = 1.5  # less than what a launcher leaves a failing process
_SMALL = re.compile(r"[\w-][\w.-]*\.(json|csv)|weights/[\w-][\w.-]*\.safetensors")  # mirrored beside checkpoints
_CHECKPOINT = re.compile(r"checkpoints/step-(\d{9,18})/([\w-][\w.-]*)")
_CLAIM = re.compile(r"owner/(\d{6})\.json")
_REMEDY = (
    "Look at the address, the network, and the credentials in the environment (for S3: AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL)."
)
_WHO = f"process {{}} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
Digests = Callable[[Path], Mapping[int, str]]
_T = TypeVar("_T")


class StoreError(UserError):
    """A request that a store did not answer, however often it was tried."""


@dataclass
class Store:
    """Files below an address, by names relative to it. A request that fails to the end raises StoreError."""

    url: str
    fs: Any  # fsspec's AbstractFileSystem
    root: str
    notes: SimpleQueue[str] = field(default_factory=SimpleQueue)  # what had to be tried again

    @classmethod
    def at(cls, url: str) -> "Store":
        """The store at an address. Raises UserError for one that nothing here can reach."""
        fs, root = reached(url.rstrip("/"), skip_instance_cache=True)
        if hasattr(fs, "auto_mkdir"):
            fs.auto_mkdir = True  # of files of this machine; an object store has no folders
        return cls(url.rstrip("/"), fs, root.rstrip("/"))

    def sizes(self, below: str = "") -> dict[str, int]:
        """Bytes of each file below a folder, by name."""

        def found_there() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            with suppress(FileNotFoundError):
                if self.url.startswith("http"):  # whose find takes a host that can't be reached for an empty folder
                    self.fs.ls(self.root)
            return dict(self.fs.find(f"{self.root}/{below}", detail=True))

        found = self._tried(f"list {below}".rstrip(), found_there)
        sizes = {path.removeprefix(f"{self.root}/"): entry.get("size") for path, entry in found.items()}
        return {name: size for name, size in sizes.items() if size is not None}  # what has none is a folder

    def read(self, name: str) -> bytes:
        """A small file's content."""
        return self._tried(f"read {name}", lambda: bytes(self.fs.cat_file(f"{self.root}/{name}")))

    def write(self, name: str, content: bytes, **mode: str) -> None:
        """Write a small file. `mode="create"`: raises FileExistsError where there is one, if the store can tell."""
        self._tried(f"write {name}", lambda: self.fs.pipe_file(f"{self.root}/{name}", content, **mode))

    def upload(self, path: Path, name: str) -> None:
        """Write a file of this machine."""
        self._tried(f"upload {name}", lambda: self.fs.put_file(str(path), f"{self.root}/{name}"))

    def download(self, name: str, path: Path) -> None:
        """Read a file to this machine."""
        self._tried(f"download {name}", lambda: self.fs.get_file(f"{self.root}/{name}", str(path)))

    def remove(self, name: str) -> None:
        """Remove a file or a folder that may be gone already."""

        def gone() -> None:
            with suppress(FileNotFoundError):
                self.fs.rm(f"{self.root}/{name}", recursive=True)

        self._tried(f"remove {name}", gone)

    def _tried(self, what: str, request: Callable[[], _T]) -> _T:
        failed: list[str] = []
        try:
            value = persist(f"can't {what}", self.url, request, failed.append)
        except UserError as error:
            raise StoreError(error.message, _REMEDY) from error.__cause__
        for note in failed[-1:]:
            self.notes.put(f"{note}, and goes well")
        return value


# A claim is a file owner/NUMBER.json, of which the highest number counts. Where the store knows a conditional put, only
# one of several writers makes it: so of two who find an expired claim, one gets the next.
def _claim(number: int) -> str:
    return f"owner/{number:06d}.json"


def claim_text(me: str) -> bytes:
    """The content of a claim by `me`, renewed now."""
    return json.dumps({"id": me, "who": _WHO.format(os.getpid()), "renewed": time.time()}).encode()


def _newest_claim(store: Store) -> tuple[int, dict[str, Any]]:
    """Its number and content; 0 where there is none."""
    number = max((int(found[1]) for found in map(_CLAIM.fullmatch, store.sizes("owner")) if found), default=0)
    with suppress(ValueError):  # it is just being written, where a store shows that
        return number, dict(json.loads(store.read(_claim(number)))) if number else {}
    return number, {}


def claim(store: Store, me: str) -> int:
    """Make `me` the only writer of a store; returns the number of its claim, from 1.

    A claim that is not renewed for LEASE_S is free, by the clock of who waits. Raises UserError where another run
    holds the store.
    """
    while True:
        number, found = _newest_claim(store)
        if found.get("id") == me:  # of this folder, whose lock is held: that process has ended
            store.write(_claim(number), claim_text(me))
            return number
        if number:
            _await_silence(store, number, found)
        with suppress(FileExistsError):  # another one was quicker: the next turn looks at that
            store.write(_claim(number + 1), claim_text(me), mode="create")
            now, found = _newest_claim(store)
            if now == number + 1 and found.get("id") == me:
                store.remove(_claim(number))
                return now


def _await_silence(store: Store, number: int, holder: Mapping[str, Any]) -> None:
    """Return when a claim is given up, or was not renewed for LEASE_S. Raises UserError where its run is alive."""
    status(f"{store.url} is claimed by {holder.get('who')}: looking for {LEASE_S:g} s whether that run is alive")
    until = time.monotonic() + LEASE_S
    while time.monotonic() < until:
        time.sleep(min(_LOOK_S, RENEW_S / 3))
        now, found = _newest_claim(store)
        if now == 0:
            return
        if (now, found) != (number, holder):
            remedy = f"Wait until that has ended ({LEASE_S:g} s after it was killed), or name another place with --out."
            raise UserError(f"{store.url} is in use by another run: {found.get('who')}", remedy)


def _checkpoints(store: Store) -> dict[int, set[str]]:
    """The names of the files of a store's checkpoints, by step in rising order."""
    found: dict[int, set[str]] = {}
    for match in filter(None, map(_CHECKPOINT.fullmatch, store.sizes("checkpoints"))):
        found.setdefault(int(match[1]), set()).add(match[2])
    return dict(sorted(found.items()))


class Mirror:
    """A run's folder and its copy in a store. Inside `with`: claimed, fetched, and what is finished here is uploaded.

    Raises UserError where another run writes there, and where the store has not everything after the end.

    Args:
        digests: of a run folder's checkpoints by step, by its journal; None: to fetch no checkpoint.
        keep: how many of the newest checkpoints stay in the store, beside the best.
        timeout_s: the longest to wait for the uploads at the end.
    """

    def __init__(
        self, url: str, folder: Path, digests: Digests | None = None, keep: int = 1, timeout_s: float = 600.0
    ) -> None:
        self.store, self.folder = Store.at(url), folder
        self.digests, self.keep, self.timeout_s = digests, keep, timeout_s
        self.me = f"{json.loads((folder / REMOTE).read_text(encoding='utf-8'))['id']} {socket.gethostname()}"
        self.number = 0  # of the claim
        self.fetched: list[str] = []  # lines that say what was done
        self._damaged = set[int]()  # steps whose checkpoint is no good in the store
        self._sent: dict[str, object] = {}  # by name: what the file was when it was uploaded
        self._given_up: StoreError | None = None  # why the newest upload is not there
        self._failures: SimpleQueue[Exception] = SimpleQueue()
        self._closing, self._ended = threading.Event(), threading.Event()
        self._uploads = threading.Thread(target=self._guarded, args=(self._upload,), name="upload", daemon=True)
        self._renewals = threading.Thread(target=self._guarded, args=(self._renew,), name="claim", daemon=True)

    def __enter__(self) -> "Mirror":
        self.number = claim(self.store, self.me)
        self.fetch()
        self._uploads.start()
        self._renewals.start()
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        status(f"uploading to {self.store.url}")
        self._closing.set()
        self._uploads.join(_LAST_UPLOAD_S if raised else self.timeout_s)
        self._ended.set()
        if raised:
            return  # the claim stays: the run may go on in a moment
        if (failure := self.failure()) is not None:
            raise failure
        if self._uploads.is_alive() or self._given_up is not None:
            why = self._given_up.message if self._given_up else f"{self.store.url}: not done in {self.timeout_s:g} s"
            remedy = f"{_REMEDY} Then the same command on this machine uploads what is missing."
            raise UserError(f"what the run did last is in {self.folder} alone. {why}", remedy)
        self._renewals.join(LEASE_S)  # a renewal under way would bring the claim back
        with suppress(StoreError):  # it expires by itself
            self.store.remove(_claim(self.number))

    def fetch(self) -> None:
        """Bring what the store has newer to the folder, which this process holds. Raises UserError.

        The small files, and the newest checkpoint that verifies. Where the run has gone on elsewhere, the local files
        are set aside first.
        """
        path, names = self.folder / JOURNAL, self.store.sizes()
        journal = self.store.read(JOURNAL) if JOURNAL in names else b""
        with writing(self.folder):
            own = path.read_bytes() if path.exists() else b""
            if not own or not own.startswith(journal):
                if own:
                    self.fetched.append(f"{self.store.url} has gone on elsewhere: what was here is in {self._aside()}")
                for name in filter(_SMALL.fullmatch, names):
                    self.store.download(name, self.folder / name)
                if journal:
                    with atomic_write(path) as temporary:  # last: where there is a journal, all is there
                        temporary.write_bytes(journal)
            if self.digests is not None:
                self._fetch_checkpoint(self.digests(self.folder))

    def _aside(self) -> Path:
        """Move the run's local files to a folder beside it, in the place of an earlier one's."""
        aside = self.folder.with_name(f"{self.folder.name}.older")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == JOURNAL):
            if path.name not in (LOCK, REQUEST, REMOTE):
                path.rename(aside / path.name)
        (self.folder / "weights").mkdir()
        return aside

    def _fetch_checkpoint(self, known: Mapping[int, str]) -> None:
        target, url, staging, have = self.folder / "checkpoints", self.store.url, self.folder / ".fetching", None
        with suppress(UserError):  # none is good here
            have = newest(target, known)
        for step, files in reversed(_checkpoints(self.store).items()):
            if have is not None and step <= have.step:
                return
            name = f"step-{step:09d}"
            if MANIFEST not in files:
                self.fetched.append(f"torn in {url} and ignored: {name}, whose upload did not end (no {MANIFEST})")
                continue
            shutil.rmtree(staging, ignore_errors=True)
            (staging / name).mkdir(parents=True)
            for file in files:
                self.store.download(f"checkpoints/{name}/{file}", staging / name / file)
            try:
                verify(staging / name, known.get(step))
            except Damaged as damage:
                self._damaged.add(step)
                self.fetched.append(f"damaged in {url} and ignored: {name} ({damage})")
                continue
            target.mkdir(exist_ok=True)
            (staging / name).rename(target / name)
            self.fetched.append(f"fetched {name} from {url}")
            return

    @property
    def failed(self) -> bool:
        """True while a reason to end the run waits in `failure`: the claim is lost. A failed upload is none."""
        return not self._failures.empty()

    def failure(self) -> Exception | None:
        """That reason."""
        return None if self._failures.empty() else self._failures.get_nowait()

    def notes(self) -> list[str]:
        """Which requests failed since the last call, in words; never waits."""
        return [self.store.notes.get_nowait() for _ in range(self.store.notes.qsize())]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the training thread raises it: `failure`
            self._failures.put(error)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._require_claim()
                self.store.write(_claim(self.number), claim_text(self.me))
            except StoreError as error:
                self.store.notes.put(error.message)

    def _require_claim(self) -> None:
        number, found = _newest_claim(self.store)
        if number != self.number:
            taken = f"{self.store.url} was taken over by {found.get('who', 'another run')}"
            remedy = f"This one had not renewed its claim in time. What it did last is in {self.folder} alone."
            raise UserError(taken, remedy)

    def _upload(self) -> None:
        seen, next_try = None, 0.0
        while True:
            last = self._closing.wait(_LOOK_S)
            now = tuple(list_checkpoints(self.folder / "checkpoints"))
            if not last and now == seen and (self._given_up is None or time.monotonic() < next_try):
                continue
            seen = now
            try:
                self.upload_new()
                self._given_up = None
            except StoreError as error:
                self._given_up, next_try = error, time.monotonic() + _RETRY_S
                self.store.notes.put(f"{error.message}. Training goes on, and this will be tried again")
            if last:
                return

    def upload_new(self) -> None:
        """Upload what the store lacks: weights before the checkpoints that go with them, and the journal last."""
        self._require_claim()
        for path in (*self.folder.iterdir(), *(self.folder / "weights").iterdir()):
            name = str(path.relative_to(self.folder))
            if _SMALL.fullmatch(name) and name != REMOTE:
                self._upload_file(path, name)
        local = list_checkpoints(self.folder / "checkpoints")
        for step, path in reversed(local.items()):
            try:
                self._upload_checkpoint(step, path)
            except (OSError, StoreError):
                if path.exists():
                    raise  # else it is old by now and was removed here
        self._prune(local)
        if (self.folder / JOURNAL).exists():
            self._upload_file(self.folder / JOURNAL, JOURNAL)

    def _upload_file(self, path: Path, name: str) -> None:
        state = (path.stat().st_mtime_ns, path.stat().st_size)
        if self._sent.get(name) != state:
            self.store.upload(path, name)
            self._sent[name] = state

    def _upload_checkpoint(self, step: int, path: Path) -> None:
        """Upload a checkpoint that the store lacks, or has otherwise: the manifest when all other files are there."""
        name, content = f"checkpoints/{path.name}", (path / MANIFEST).read_bytes()
        if self._sent.get(name) == content:
            return
        there, manifest = self.store.sizes(name), f"{name}/{MANIFEST}"
        if step in self._damaged or manifest not in there or self.store.read(manifest) != content:
            self._require_claim()
            if manifest in there:
                self.store.remove(manifest)
            files = Manifest.from_bytes(content).files
            for file in files:
                self.store.upload(path / file, f"{name}/{file}")
            there = self.store.sizes(name)
            if short := [file for file, record in files.items() if there.get(f"{name}/{file}") != record.bytes]:
                raise StoreError(f"{self.store.url}: {name} has less than was written of {', '.join(short)}", _REMEDY)
            self.store.write(manifest, content)
            self._damaged.discard(step)
        self._sent[name] = content

    def _prune(self, local: Mapping[int, Path]) -> None:
        """Remove the store's older checkpoints but the best one's, torn ones, and those that a rollback left behind."""
        found, last = _checkpoints(self.store), max(local, default=-1)
        best = read_metadata(self.folder / "weights" / "best.safetensors").get("step")
        good = [step for step in found if MANIFEST in found[step] and step <= last and step not in self._damaged]
        stay = {*local, *good[-self.keep :], *self._damaged}
        for step in found if local else ():
            if step not in stay and str(step) != best:
                self.store.remove(f"checkpoints/step-{step:09d}/{MANIFEST}")  # first: then it counts as torn
                self.store.remove(f"checkpoints/step-{step:09d}")


def make_local(url: str) -> Path:
    """Make the folder of this machine where the run at an address works, with an id by which it claims that."""
    require_no_secrets(url)
    url = url.rstrip("/")
    name = re.sub(r"[^\w.-]", "-", url.rpartition("/")[2])
    folder = user_cache("runs") / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    with writing(folder):
        (folder / "weights").mkdir(parents=True, exist_ok=True)
    if not (folder / REMOTE).exists():
        write_json(folder / REMOTE, {"url": url, "id": os.urandom(8).hex()})
    return folder


def fetched(url: str) -> Path:
    """The local folder of a run at an address, with what the store has but checkpoints. Raises UserError."""
    folder = make_local(url)
    if writer(folder) != "here":  # else that run has all, and newer
        with hold(folder):
            Mirror(url, folder).fetch()
    if not (folder / "config.json").exists():
        raise UserError(f"{url} holds no run", "Name one that `lockstep train --out` made.")
    return folder
