"""Pictures in tar files: `--dataset shards:URL`, a folder, a pattern, or an address.

An index says where each picture lies, so a sample is one read of so many bytes at such a place, whose digest is known:
nothing else than what was indexed is ever trained on.
"""

import copy
import hashlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep.config import DataConfig
from lockstep.data.contents import content_words
from lockstep.data.folders import held_split, split_of
from lockstep.data.image_sets import Array, Ids
from lockstep.data.order import Windows
from lockstep.data.picture_set import PictureSet, class_name, refused, user_cache
from lockstep.data.remote import PieceCache, expand_braces, list_files, read_range, stat
from lockstep.data.shard_index import Index, ShardList, build, open_index, require_unchanged
from lockstep.distributed.files import named
from lockstep.distributed.proc import cores
from lockstep.distributed.world import World
from lockstep.errors import UserError, is_url, reason, require_no_secrets, shown, unknown

OPTIONS = ("val", "classes", "label")
_BLOCK = 8 << 20  # bytes of a piece, where samples near each other are read soon after each other
_AT_ONCE = 16  # reads under way in a process
_SHOWN = 5
_COMPRESSED = re.compile(r"\.(tar\.(gz|bz2|xz|zst)|tgz)\Z", re.IGNORECASE)


class ShardSource:
    """Pictures in shards, by an index. Pickles as a few words, unless only some samples are taken.

    `piece`: bytes that are read at once behind an address (0: a sample).
    """

    def __init__(self, shards: ShardList, index: Index, cache: PieceCache | None, piece: int = 0) -> None:
        self.shards, self.index, self.cache, self.piece = shards, index, cache, piece
        self.numbers: Ids | None = None  # int64 [n]: each sample's number in the index, if not its own
        self.classes: Ids | None = None  # int64: what the index's label k is, if not k
        self._held: dict[int, bytes] = {}  # pictures that are asked for next
        self._ahead: Any = None  # the shards whose pieces are read in the background

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": {}, "_ahead": None}

    @property
    def labels(self) -> Ids:
        """The samples' labels, int64 [n]: mapped, where they are those of the index."""
        labels = self.index.arrays["labels"]
        labels = labels if self.classes is None else self.classes[labels]
        return labels if self.numbers is None else labels[self.numbers]

    @property
    def shard_sizes(self) -> Ids:
        """Samples of each shard, int64 [shards]."""
        firsts = self.index.firsts
        return np.diff(firsts if self.numbers is None else np.searchsorted(self.numbers, firsts))

    def digests(self, ids: Ids) -> Array:
        """The first 128 bits of SHA-256 of these pictures, int64 [n, 2]."""
        return self.index.arrays["digests"][ids if self.numbers is None else self.numbers[ids]]

    def key(self, sample: int) -> str:
        """Shard and key, as train-000003.tar/n0144_12."""
        number = self._number(sample)
        return f"{self.shards.names[self.index.shard_of(number)]}/{self.index.key(number)}"

    def where(self, sample: int) -> str:
        """The shard's path or address, and the key."""
        return shown(self.shards.base + self.key(sample))

    def stat(self, sample: int) -> tuple[int, int, int, int]:
        """Bytes; the index stands for the rest."""
        return int(self.index.arrays["sizes"][self._number(sample)]), 0, 0, 0

    def take(self, ids: Ids) -> Self:
        """These samples alone, numbered in their order."""
        taken = copy.copy(self)
        taken.numbers = ids if self.numbers is None else self.numbers[ids]
        return taken

    def fetch(self, ids: Ids) -> None:
        """Read pictures at once that are asked for next, where each read takes long."""
        if is_url(self.shards.base):
            chosen = list(dict.fromkeys(ids.tolist()))
            self._held = dict(zip(chosen, _threads(os.getpid()).map(self._read, chosen), strict=True))

    def read_ahead(self, sample: int, order: Ids, width: int) -> None:
        """Begin to read this sample's window of shards, and the next one, where the cache has room for them."""
        now = int(np.flatnonzero(order == self.index.shard_of(self._number(sample)))[0]) // width
        shards = order[now * width : (now + 2) * width].tolist()
        if shards != self._ahead and self.piece and self.cache is not None and is_url(self.shards.base):
            self._ahead = shards
            if 2 * sum(self.index.shards[shard][1] for shard in shards) < self.cache.limit:
                threading.Thread(target=self._fill, args=(shards,), daemon=True, name="lockstep ahead").start()

    def _fill(self, shards: list[int]) -> None:
        """What can't be read is left to who needs it, and gets the error."""
        for shard in shards:
            number, end = self.index.firsts[shard : shard + 2].tolist()
            while number < end and self.cache is not None:
                piece = self._piece(number, shard)
                name, _, fetch = self._located(piece, shard)
                with suppress(UserError):
                    self.cache.fill(name, fetch)
                number = piece.stop

    def read(self, sample: int) -> bytes:
        """The picture as it is stored. Raises UserError where it is not what was indexed."""
        held = self._held.get(sample)
        return self._read(sample) if held is None else held

    def _number(self, sample: int) -> int:
        return sample if self.numbers is None else int(self.numbers[sample])

    def _sound(self, data: bytes, start: int, numbers: range) -> bytes:
        """These bytes, from byte `start` of their shard on. Raises OSError for a picture that is another one."""
        arrays = self.index.arrays
        for number in numbers:
            at = int(arrays["starts"][number]) - start
            if content_words(data[at : at + int(arrays["sizes"][number])]) != tuple(arrays["digests"][number].tolist()):
                raise OSError(f"other bytes came for {self.index.key(number)} than were indexed")
        return data

    def _read(self, sample: int) -> bytes:
        number = self._number(sample)
        shard, arrays = self.index.shard_of(number), self.index.arrays
        url, start, size = self.shards.url(shard), int(arrays["starts"][number]), int(arrays["sizes"][number])
        alone = range(number, number + 1)
        if self.cache is None or not is_url(url):
            return read_range(url, start, size, lambda data: self._sound(data, start, alone))
        name, first, fetch = self._located(self._piece(number, shard) if self.piece else alone, shard)
        for _ in range(2):
            try:
                return self._sound(self.cache.read(name, start - first, size, fetch), start, alone)
            except OSError as error:  # damaged on the disk
                self.cache.drop(name)
                what = f"{self.cache.folder}: {reason(error)}"
        raise refused(what, "Is its disk sound? XDG_CACHE_HOME names another.")

    def _located(self, piece: range, shard: int) -> tuple[str, int, Callable[[], bytes]]:
        """A piece's name in the cache, where it begins in its shard, and how it is read."""
        arrays, url = self.index.arrays, self.shards.url(shard)
        first, end = int(arrays["starts"][piece[0]]), int(arrays["starts"][piece[-1]] + arrays["sizes"][piece[-1]])
        about = repr((url, first, end)).encode("utf-8", "surrogatepass")
        name = hashlib.sha256(about + arrays["digests"][piece.start : piece.stop].tobytes()).hexdigest()
        return name, first, lambda: read_range(url, first, end - first, lambda data: self._sound(data, first, piece))

    def _piece(self, number: int, shard: int) -> range:
        """The samples of a shard that are read together with one of them."""
        first, end = self.index.firsts[shard : shard + 2].tolist()
        starts = self.index.arrays["starts"][first:end]
        block = (starts[number - first] - starts[0]) // self.piece  # a piece is what begins in the same block
        low, high = np.searchsorted(starts, starts[0] + np.array([block, block + 1]) * self.piece).tolist()
        return range(first + low, first + high)


@lru_cache(2)
def _threads(pid: int) -> ThreadPoolExecutor:  # noqa: ARG001  # threads don't survive a fork
    return ThreadPoolExecutor(_AT_ONCE, "lockstep shards")


@dataclass(frozen=True, eq=False)
class ShardSet(PictureSet):
    """A `PictureSet` of shards: labels are mapped, not pickled, and the index knows what is in it."""

    source: ShardSource
    window: int = 0  # shards whose samples are shuffled together

    @cached_property
    def fingerprint(self) -> str:
        """Digest of classes, labels and pictures, wherever the shards lie."""
        digest = hashlib.sha256(repr((self.classes, self.source.index.measured())).encode("utf-8", "surrogatepass"))
        if self.source.numbers is not None:
            digest.update(self.source.numbers.tobytes())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "labels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, labels=state["source"].labels)

    def read(self, ids: Ids, epoch: int | None = None, draws: Ids | None = None) -> tuple[Any, Any]:
        """As `PictureSet.read`; behind an address the pictures are read at once."""
        if self.cache is None:
            if epoch is not None and self.window and len(ids):
                order = Windows(self.source.shard_sizes, self.window, self.seed).shards(epoch)
                self.source.read_ahead(int(ids[-1]), order, self.window)
            self.source.fetch(ids)
        return super().read(ids, epoch, draws)


# ---- from a name to sets


def load_shards(data: DataConfig, data_dir: Path, world: World) -> tuple[ShardSet, ShardSet | None]:
    """The sets of a `shards:` name; all ranks call it together, of which one a host builds the index or looks at it.
    Raises UserError for what is not there, or has changed since it was indexed; PeerError on that host's other ranks.
    """
    parts, options = find_parts(data.dataset, data_dir)
    first, second = chosen_parts(parts, data)
    left = sorted(parts.keys() - {first, second})
    train = _indexed(parts[first], _BLOCK if data.shuffle_window else 0, world)
    names = train.index.label_names
    classes = _classes(options.get("classes", ""), parts[first], train.index)
    train.classes = _places(names, classes, parts[first]) if names and names != classes else None
    notes = [f"note: {each} is left alone" for each in left]
    if absent := np.flatnonzero(np.bincount(train.labels, minlength=len(classes)) == 0).tolist():
        listed = ", ".join(classes[k] for k in absent[:_SHOWN]) + (", ..." if len(absent) > _SHOWN else "")
        notes.append(shown(f"note: no picture of {len(absent):,} class(es): {listed}"))
    name, window = f"shards:{shown(parts[first].title)}", data.shuffle_window
    made = ShardSet(name, classes, train.labels, train, split=first, notes=tuple(notes), window=window)
    if not second:
        return made, None
    val = _indexed(parts[second], _BLOCK, world)
    if bool(val.index.label_names) != bool(names):
        what = f"{parts[second].title} and {parts[first].title}: the labels of one are names, of the other numbers"
        raise refused(what, "Write them in one way.")
    if names:
        val.classes = _places(val.index.label_names, classes, parts[second])
    elif (most := int(val.labels.max())) >= len(classes):
        what = f"{parts[second].title}: a label is {most}, and there are {len(classes)} classes to train on"
        raise refused(what, "Labels run from 0; both parts need the same classes.")
    return made, ShardSet(f"shards:{shown(parts[second].title)}", classes, val.labels, val)


def _indexed(shards: ShardList, piece: int, world: World) -> ShardSource:
    with world.first_on_host():
        if world.local_rank == 0:
            if (index := open_index(shards)) is None:
                title = shown(shards.title)
                print(f"note: {title}: there is no index yet; it is built now, once", file=sys.stderr, flush=True)
                build(shards, cores(), lambda k, n: world.status(f"starting: indexing {title}: {k:,} of {n:,} shards"))
            else:
                require_unchanged(shards, index)
    if (index := open_index(shards)) is None:
        raise refused(f"the index of {shards.title} is gone, or is not to be read here", "Run `lockstep index`.")
    gib = float(os.environ.get("LOCKSTEP_SHARD_CACHE_GIB") or 20)
    cache = PieceCache(user_cache("shards") / "pieces", int(gib * 2**30)) if gib > 0 else None
    return ShardSource(shards, index, cache, piece if cache else 0)


def find_parts(dataset: str, data_dir: Path) -> tuple[dict[str, ShardList], dict[str, str]]:
    """The shards of train, val and test, as far as a `shards:` name has them, and its options."""
    url, *rest = re.split(r"[:,](?=[a-z_]+=)", dataset.partition(":")[2])
    options = dict(each.split("=", 1) for each in rest)
    if not url:
        raise UserError(f"--dataset {dataset} names nothing", "As shards:FOLDER or 'shards:URL/train-{000..099}.tar'.")
    if strange := [key for key in options if key not in OPTIONS]:
        raise unknown("option of shards:", strange[0], OPTIONS, "Parquet files are read by --dataset hf:FOLDER.")
    label = options.get("label", "")
    parts = _parts(url, data_dir, label)
    if "val" in options:
        others = _parts(options["val"], data_dir, label)
        parts = {"train": parts.get("train", next(iter(parts.values())))}
        parts["val"] = others.get("val", next(iter(others.values())))
    return parts, options


def chosen_parts(parts: dict[str, ShardList], data: DataConfig) -> tuple[str, str]:
    """The part to train on, and that to validate on ("": none)."""
    if "train" not in parts and len(parts) > 1:
        what = f"--dataset {data.dataset} has {' and '.join(parts)}, and nothing to train on"
        raise refused(what, "Name the shards to train on by a pattern.")
    held = held_split(parts, data.val_fraction)
    return ("train", held) if "train" in parts else (next(iter(parts)), "")


def _parts(url: str, data_dir: Path, label: str) -> dict[str, ShardList]:
    """The shards behind a name, by split; those of a folder without splits are "train"."""
    require_no_secrets(url)
    _require_no_parquet([url])
    _require_no_compressed([url])
    url = url.removeprefix("file://")
    places = [url] if is_url(url) else [str(named(url).absolute()), str(data_dir.absolute() / url)]
    for place in places:
        found: dict[str, list[str]] = {}
        if place.lower().endswith(".tar") or "{" in place or "*" in place:
            each = expand_braces(place)
            found["train"] = [file for one in each for file in (list_files(one) if "*" in one else [one])]
            if not is_url(place) and (gone := [file for file in found["train"] if not Path(file).is_file()]):
                found = {} if len(gone) == len(found["train"]) else found
                if found:
                    raise refused(f"there is no shard {gone[0]}, of {len(found['train']):,}", "Put it back.")
        else:
            found = _of_folder(place) or _of_folder(f"{place}/data")  # where the hub has it
        if any(found.values()):
            return {split: _listed(files, label) for split, files in found.items()}
    what = f"there are no shards at {' or '.join(dict.fromkeys(places))}"
    raise refused(what, "Name a folder of .tar files, or a pattern: 'train-{000..099}.tar'.")


def _require_no_parquet(files: Iterable[str]) -> None:
    """Raise UserError where one of them is a Parquet file, by its name."""
    if file := next((each for each in files if each.endswith(".parquet")), ""):
        what = f"{file} is a Parquet file, and shards: reads tar files"
        raise refused(what, "--dataset hf:FOLDER reads Parquet files, from a folder of this machine.")


def _require_no_compressed(files: Iterable[str]) -> None:
    """Raise UserError where one of them is a compressed tar file, by its name: it would be passed over unsaid."""
    if file := next(filter(_COMPRESSED.search, files), ""):
        what = f"{file} is a compressed tar file, of which no part can be read alone"
        raise refused(what, "Unpack it to a plain .tar, or take it out of the folder.")


def _of_folder(folder: str) -> dict[str, list[str]]:
    """The shards of a folder: in its folders train, val and test, or beside each other by their names."""
    files: list[tuple[str, str]] = []  # each with the name of its split
    for entry in list_files(folder):
        name = entry.rpartition("/")[2]
        if split_of(name):
            files += [(name, each) for each in list_files(entry)]
        else:
            files.append((next(filter(split_of, re.split(r"[-_.]", name)), ""), entry))
    _require_no_compressed(file for _, file in files)
    found: dict[str, list[str]] = {}
    called: dict[str, str] = {}
    for word, file in files:
        if file.lower().endswith(".tar"):
            split = split_of(word)
            found.setdefault(split, []).append(file)
            if called.setdefault(split, word) != word:
                what = f"{folder} has shards called {called[split]} as well as {word}"
                raise refused(what, f"Keep those of one name for {split}, or name them by a pattern.")
    if not found:
        _require_no_parquet(file for _, file in files)
    if "" in found and len(found) == 1:
        return {"train": found[""]}
    if odd := found.get(""):
        raise refused(f"{odd[0]} is beside shards whose names say train or val", "Name the shards by a pattern.")
    return found


def _listed(files: list[str], label: str) -> ShardList:
    _require_no_parquet(files)
    folders = zip(*(file.split("/")[:-1] for file in files), strict=False)
    base = "/".join(each[0] for each in takewhile(lambda names: len(set(names)) == 1, folders)) + "/"
    return ShardList(base, tuple(file.removeprefix(base) for file in files), label)


def _classes(file: str, shards: ShardList, index: Index) -> tuple[str, ...]:
    """The classes' names: those of a file, one a line; else the labels themselves."""
    count = int(index.arrays["labels"].max()) + 1
    if not file:
        return index.label_names or tuple(map(str, range(count)))
    place = file if is_url(file) or Path(file).is_file() else shards.base + file
    try:
        text = read_range(place, 0, stat(place)[0]).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused(f"{place} can't be read: {error}", "Name a text file in UTF-8.") from error
    names = tuple(class_name(line.strip()) for line in text.splitlines() if line.strip())
    if len(set(names)) < len(names):
        raise refused(f"{place} has a class twice", "One line for each class, in the order of the labels.")
    if not index.label_names and count > len(names):
        raise refused(f"{place} has {len(names):,} classes, and a label is {count - 1}", "Labels run from 0.")
    return names


def _places(names: tuple[str, ...], classes: tuple[str, ...], shards: ShardList) -> Ids:
    """Each label's class by its name."""
    number = {name: k for k, name in enumerate(classes)}
    if strange := [name for name in names if name not in number]:
        what = f"{shards.title} has classes that are not among those to train on: {', '.join(strange[:_SHOWN])}"
        raise refused(what, "Both parts, and a file of classes, need the same ones.")
    return np.array([number[name] for name in names], np.int64)
