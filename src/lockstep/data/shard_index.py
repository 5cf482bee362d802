"""The index of a list of tar files as webdataset writes them: where each picture lies, what it is, and its label.

A safetensors file of arrays, mapped by whoever reads samples: `starts` and `sizes` of the pictures in their shards,
`digests` of their bytes, `labels`, and their keys one after the other. It is built from one file for each shard, so
that who was killed goes on with the shards that are missing.
"""

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lockstep.data.contents import content_words
from lockstep.data.folders import is_ignored
from lockstep.data.image_sets import Array
from lockstep.data.picture_set import EXTENSIONS, class_name, refused, user_cache
from lockstep.data.remote import Stream, stat
from lockstep.distributed.files import atomic_write, try_lock, write_error
from lockstep.errors import is_url, reason

_VERSION = "lockstep shards 3"
_FIELDS = ("label", "cls", "class", "target", "class_name")  # of a .json, where none is named
_BUILD_S = 7 * 86400.0  # that another process may take to build the same index
_SHOWN = 8  # fields in a message
_REMEDY = "Write it again, or take it out of the list."
Report = Callable[[int, int], None]  # shards that are done, and all of them
Row = tuple[str, int, str, int]  # of a shard: its name, bytes, `stat`'s mark, samples


@dataclass(frozen=True)
class ShardList:
    """The tar files of a part of a data set, in their order."""

    base: str  # the folder or address that all begin with
    names: tuple[str, ...]  # behind it
    field: str = ""  # of each .json, that holds the label; "": one of the usual names

    def url(self, number: int) -> str:
        """A shard's path or address."""
        return self.base + self.names[number]

    @cached_property
    def places(self) -> tuple[Path, ...]:
        """Where the index may be: beside local shards, and in the user's cache."""
        key = hashlib.sha256(repr((self.names, self.field)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        whole = hashlib.sha256(f"{self.base} {key}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
        own = user_cache("shards") / "indexes" / f"{whole}.safetensors"
        return (own,) if is_url(self.base) else (Path(self.base) / f".lockstep-{key}.safetensors", own)

    @property
    def title(self) -> str:
        """For messages: the first shard, and how many others."""
        others = f" and {len(self.names) - 1:,} more" if len(self.names) > 1 else ""
        return f"{self.url(0)}{others}"


class Index:
    """An index file, mapped. Raises OSError, ValueError or SafetensorError where it is torn or no such file."""

    def __init__(self, path: Path, content: str = "") -> None:
        with safe_open(path, "pt") as file:  # maps; "np" would copy
            about = json.loads((file.metadata() or {}).get("index", "{}"))
            if about.get("version") != _VERSION or (content and about["content"] != content):
                raise ValueError("it is another index, or of another version")
            self.arrays: dict[str, Array] = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        self.path = path
        self.shards: list[Row] = [tuple(each) for each in about["shards"]]
        self.label_names = tuple(about["label_names"])  # (): labels are whole numbers
        self.content: str = about["content"]
        counts = np.array([count for *_, count in self.shards], np.int64)
        self.firsts = np.append(0, np.cumsum(counts))  # of each shard, and the number of samples

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __reduce__(self) -> Any:
        return Index, (self.path, self.content)  # a worker maps it again

    def shard_of(self, sample: int) -> int:
        """The number of a sample's shard."""
        return int(np.searchsorted(self.firsts, sample, side="right")) - 1

    def key(self, sample: int) -> str:
        """A sample's key in its shard."""
        ends = self.arrays["key_ends"]
        shard = self.shard_of(sample)
        start = int(ends[sample - 1]) if sample > self.firsts[shard] else 0
        base = int(self.arrays["key_starts"][shard])
        return bytes(self.arrays["keys"][base + start : base + int(ends[sample])]).decode("utf-8", "surrogateescape")

    def rows(self, shard: int) -> dict[str, Array]:
        """The arrays of one shard."""
        part = slice(self.firsts[shard], self.firsts[shard + 1])
        keys = slice(*self.arrays["key_starts"][shard : shard + 2].tolist())
        return {
            name: array[keys if name == "keys" else part] for name, array in self.arrays.items() if name != "key_starts"
        }

    def measured(self) -> str:
        """The digest of labels and pictures as they stand there now; `content` is what was written."""
        return _digest(self.arrays, self.label_names)


def _digest(arrays: dict[str, Array], names: Sequence[str]) -> str:
    digest = hashlib.sha256(repr(tuple(names)).encode("utf-8", "surrogatepass"))
    for name in ("labels", "sizes", "digests"):
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def open_index(shards: ShardList) -> Index | None:
    """The index of these shards where there is a sound one, whether they are unchanged or not."""
    for path in shards.places:
        try:
            index = Index(path)
        except (OSError, ValueError, KeyError, SafetensorError):
            continue  # missing or torn: it is built
        if tuple(name for name, *_ in index.shards) == shards.names and index.measured() == index.content:
            return index
    return None


def changed(shards: ShardList, index: Index, jobs: int = 32) -> list[tuple[int, str]]:
    """The shards that are no longer what was indexed, and how; all are looked at. Raises UserError for a lost one."""

    def fault(number: int) -> str:
        _, size, mark, _ = index.shards[number]
        now = stat(shards.url(number))
        if now[0] != size:
            return f"it has {now[0]:,} bytes, and had {size:,}"
        return f"it was written again ({now[1]}, and was {mark})" if now[1] != mark else ""

    with ThreadPoolExecutor(jobs if is_url(shards.base) else 1) as pool:
        return [(number, text) for number, text in enumerate(pool.map(fault, range(len(shards.names)))) if text]


def require_unchanged(shards: ShardList, index: Index) -> None:
    """Raise UserError where a shard is no longer what was indexed."""
    if found := changed(shards, index):
        number, what = found[0]
        more = f"; and {len(found) - 1:,} more" if len(found) > 1 else ""
        what = f"{shards.url(number)} has changed since it was indexed: {what}{more}"
        raise refused(what, "If that is meant, run `lockstep index` again.")


def build(shards: ShardList, jobs: int, report: Report) -> Index:
    """Index what has no index yet, or has changed since; the rest is taken over from an earlier index.
    Raises UserError for what is no shard, naming it, and where nothing can be written.
    """
    place = next((path for path in shards.places if os.access(path.parent, os.W_OK)), shards.places[-1])
    total, parts = len(shards.names), place.with_suffix(".parts")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.parent):
            old = open_index(shards)
            fresh = set(range(total)) if old is None else {number for number, _ in changed(shards, old)}
            if old is not None and not fresh:
                return old
            parts.mkdir(exist_ok=True)
            files = {number: parts / f"{number:07}.safetensors" for number in sorted(fresh)}
            with ThreadPoolExecutor(jobs) as pool:
                made = pool.map(partial(_index_part, shards), files.keys(), files.values())
                for done, _ in enumerate(made, total - len(fresh) + 1):
                    report(done, total)
            _join(shards, files, place, old)
            shutil.rmtree(parts)
    except OSError as error:
        raise write_error(place, error, "the index ") from error
    return Index(place)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder's lock for this process, after whoever holds it now."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try_lock(descriptor, _BUILD_S)
        yield
    finally:
        os.close(descriptor)


def _index_part(shards: ShardList, number: int, path: Path) -> None:
    """The index of one shard in a file of its own, unless that is there already."""
    url = shards.url(number)
    size, mark = stat(url)
    with suppress(OSError, ValueError, KeyError, SafetensorError):  # not there, or of another version
        if Index(path).shards[0][:3] == (shards.names[number], size, mark):
            return
    samples = [*_samples(url, size, shards.field)]
    labels = [sample.label for sample in samples]
    if stat(url) != (size, mark):
        raise refused(f"{url} changed while it was read", "Run `lockstep index` again when it is whole.")
    names = sorted({label for label in labels if isinstance(label, str)})
    place = {name: k for k, name in enumerate(names)}
    keys = [sample.key.encode("utf-8", "surrogateescape") for sample in samples]
    arrays: dict[str, Array] = {
        "starts": np.array([sample.start for sample in samples], np.int64),
        "sizes": np.array([sample.size for sample in samples], np.int32),
        "labels": np.array([place[label] if isinstance(label, str) else label for label in labels], np.int64),
        "digests": np.array([sample.words for sample in samples], np.int64).reshape(-1, 2),
        "key_ends": np.cumsum([len(key) for key in keys], dtype=np.int32),
        "key_starts": np.array([0, sum(map(len, keys))], np.int64),
        "keys": np.frombuffer(b"".join(keys), np.uint8),
    }
    _require_one_kind(url, {isinstance(sample.label, str): sample.key for sample in reversed(samples)})
    write_index(path, arrays, [(shards.names[number], size, mark, len(samples))], names)


def _require_one_kind(where: str, keys: dict[bool, str]) -> None:
    """Raise UserError where labels are names as well as numbers. `keys`: of a sample with a name, and of another."""
    if len(keys) > 1:
        what = f"{where}: some labels are names, and some are numbers, as of {keys[True]} and {keys[False]}"
        raise refused(what, "Write them in one way.")


def write_index(path: Path, arrays: dict[str, Array], rows: Sequence[Row], names: Sequence[str]) -> None:
    """Write an index file, whole or not at all. Raises OSError."""
    about = {"version": _VERSION, "shards": rows, "label_names": names, "content": _digest(arrays, names)}
    with atomic_write(path) as temporary:
        save_file(arrays, temporary, {"index": json.dumps(about)})
        temporary.chmod(0o644)  # others may read the shards too


def _join(shards: ShardList, files: dict[int, Path], place: Path, old: Index | None) -> None:
    """Write the index of all shards, of the new ones' files and of the old index."""
    opened = {number: Index(path) for number, path in files.items()}
    sources = [(opened[k], 0) if old is None or k in opened else (old, k) for k in range(len(shards.names))]
    filled = [(index, k) for index, k in reversed(sources) if index.shards[k][3]]
    firsts = {bool(index.label_names): f"{index.shards[k][0]}/{index.key(int(index.firsts[k]))}" for index, k in filled}
    _require_one_kind(shards.title, firsts)
    names = tuple(sorted({name for index, _ in sources for name in index.label_names}))
    place_of = {name: k for k, name in enumerate(names)}
    rows: dict[str, list[Array]] = {}
    for index, k in sources:
        own = index.rows(k)
        if index.label_names:
            own["labels"] = np.array([place_of[name] for name in index.label_names], np.int64)[own["labels"]]
        for name, array in own.items():
            rows.setdefault(name, []).append(array)
    starts = np.cumsum([0, *map(len, rows["keys"])], dtype=np.int64)
    arrays = {name: np.concatenate(each) for name, each in rows.items()} | {"key_starts": starts}
    if not len(arrays["labels"]):
        raise refused(f"{shards.title}: no sample in it", "Samples are KEY.jpg and KEY.cls, or KEY.json with a label.")
    write_index(place, arrays, [index.shards[k] for index, k in sources], names)


# ---- tar files


@dataclass
class _Sample:
    key: str
    kind: str = ""  # the picture's ending
    start: int = 0
    size: int = 0
    words: tuple[int, ...] = ()
    label: int | str | None = None
    about: bytes = b""  # what the label was looked for in


def _samples(url: str, size: int, field: str) -> Iterator[_Sample]:
    """The samples of a shard: its members by what stands before the first dot of their names."""
    seen: set[str] = set()
    now: _Sample | None = None
    for name, start, data in _members(url, size):
        folder, slash, file = name.rpartition("/")
        stem, _, ending = file.partition(".")
        key, ending = folder + slash + stem, ending.lower()
        if not ending or is_ignored(file) or (stem.startswith("__") and stem.endswith("__")):
            continue  # no sample for webdataset either
        if now is None or key != now.key:
            if now is not None:
                yield _whole(url, now)
            if key in seen:
                raise refused(f"{url}: the members of {key} do not lie side by side", _REMEDY)
            seen.add(key)
            now = _Sample(key)
        if f".{ending}" in EXTENSIONS:
            if now.kind:
                raise refused(f"{url}: {key} has two pictures, .{now.kind} and .{ending}", "One label, one picture.")
            now.kind, now.start, now.size, now.words = ending, start, len(data), content_words(data)
        elif (ending == "cls" and not field) or (ending == "json" and now.label is None):
            now.label, now.about = _label(f"{url}: {name}", data, ending, field), data
    if now is not None:
        yield _whole(url, now)


def _whole(url: str, sample: _Sample) -> _Sample:
    if not sample.kind:
        raise refused(f"{url}: {sample.key} has no picture", f"Pictures end in {', '.join(EXTENSIONS)}.")
    if sample.label is None:
        fields = [*json.loads(sample.about or "{}")][:_SHOWN]
        there = f", as :label={fields[0]}; it has {', '.join(fields)}" if fields else ""
        raise refused(f"{url}: {sample.key} has no label", f"It stands in KEY.cls, or in a field of KEY.json{there}.")
    if not sample.size:
        raise refused(f"{url}: the picture of {sample.key} is empty", _REMEDY)
    return sample


def _label(where: str, data: bytes, ending: str, field: str) -> int | str | None:
    """A whole number, or a class's name; None for a .json without the field."""
    try:
        text = data.decode("utf-8").strip()
        value: Any = text
        if ending == "json":
            held = json.loads(text)
            value = held.get(field or next((each for each in _FIELDS if each in held), ""))
            if value is None:
                return None
        elif re.fullmatch(r"[-+]?\d+", text):
            value = int(text)
    except (ValueError, AttributeError) as error:
        raise refused(f"{where} is no text or JSON object: {reason(error)}", _REMEDY) from error
    if type(value) is int and 0 <= value < 1 << 31:
        return value
    if isinstance(value, str) and value.isprintable() and (name := class_name(value.strip())):
        return name
    raise refused(f"{where}: the label is {value!r:.80}", "It is a whole number from 0, or the class's name.")


def _members(url: str, size: int) -> Iterator[tuple[str, int, bytes]]:
    """Name, place and content of each plain file in a tar. Raises UserError where that is not whole."""
    stream: Any = Stream(url, size)
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as archive:
            while (member := archive.next()) is not None:
                vars(archive)["members"].clear()  # it would keep all of them
                if member.isreg() and not member.issparse():
                    file = archive.extractfile(member)
                    yield member.name, member.offset_data, b"" if file is None else file.read()
            end = archive.offset
        while stream.read(1 << 20):
            pass
    except (tarfile.TarError, EOFError) as error:
        raise refused(f"{url} is no whole tar file: {reason(error)}", f"Is it compressed, or cut? {_REMEDY}") from error
    # tarfile takes a damaged header for the end
    if stream.count - end > stream.zeros or stream.count - end < tarfile.BLOCKSIZE:
        raise refused(f"{url} is damaged or cut: no member and no end of a tar file at byte {end:,}", _REMEDY)
