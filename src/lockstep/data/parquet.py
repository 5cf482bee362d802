"""Parquet files of pictures, as the datasets library and pyarrow write them: where each picture's bytes lie.

A column's values lie in pages, each compressed by itself, one value after the other behind its length. So in a page
that is not compressed a picture is a range of the file, as in a tar file; else its page is the least that is read.
The format is read here, since a damaged file ends pyarrow's process; of pyarrow's are the decompressors.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.adapters import LABELS, column_of
from lockstep.data.contents import content_words
from lockstep.data.image_sets import Array
from lockstep.data.picture_set import class_name, refused
from lockstep.data.remote import CHUNK, read_range
from lockstep.errors import UserError, reason

# What follows is named by numbers in https://github.com/apache/parquet-format, src/main/thrift/parquet.thrift
_CODECS = {0: "", 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3  # kinds of pages
_PLAIN, _BY_NUMBER = 0, (2, 8)  # encodings: one value after the other; numbers of those in the dictionary page
_INT32, _INT64, _BYTES = 1, 2, 6  # types
_LARGEST, _FREE, _RATIO = 1 << 30, 64 << 20, 100  # bytes of a page unpacked; from so many on at most so much larger
_FOOTER, _LEAST = 16 << 20, 8  # bytes of metadata at most, of a row at least
REMEDY = "Write it again, or take it out of the list."
Place = tuple[int, int, int, tuple[int, ...]]  # the page, where in it, bytes, digest
Picture = tuple[int, int, tuple[int, ...], Any]  # start, bytes, digest, and the label as it is stored
Decode = Callable[[int, bytes, int, int], Iterable[Any]]  # of a page's number, its bytes, where values begin, how many


class Page(NamedTuple):
    """Where a page's values lie in the file, and how large they are unpacked."""

    place: int
    stored: int
    size: int
    codec: int


class _Column(NamedTuple):
    number: int
    kind: int  # -1: of lists
    levels: int  # of it and what it is in, that may be missing


def unpacked(data: bytes, size: int, codec: int) -> bytes:
    """A page's bytes. Raises OSError or ValueError where it is damaged."""
    if not codec:
        return data
    try:
        import pyarrow
    except ImportError as error:
        raise UserError("Parquet files need pyarrow", "pip install 'lockstep-torch[parquet]'") from error
    return bytes(pyarrow.decompress(data, size, _CODECS[codec], asbytes=True))


def pictures(url: str, size: int, label: str, image: str) -> tuple[list[Picture], tuple[str, ...], Array]:
    """The rows of a file, the classes' names where it has such, and the pages that have to be unpacked, int64 [m, 4].

    Starts are places in the file where there are no such pages; else in the pages, unpacked, one after the other.
    `label`, `image`: the columns ("": found). Raises UserError, naming file and row.
    """
    file = _File(url, size)
    of_image, of_label, names = file.columns(label, image)
    rows: list[tuple[Place, Any]] = []
    pages: list[Page] = []
    for group in range(len(file.groups)):
        labels = [*file.values(group, of_label, partial(_labels, of_label.kind), [], len(rows))]
        for place, value in zip(file.values(group, of_image, _places, pages, len(rows)), labels, strict=True):
            if not place or not place[2]:
                what = f"{url}: row {len(rows):,} has no picture's bytes"
                raise refused(what, "Write the pictures into the file, as the datasets library's to_parquet does.")
            if names and not (type(value) is int and 0 <= value < len(names)):
                what = f"{url}: row {len(rows):,} has the label {value!r:.80}, and there are {len(names):,} classes"
                raise refused(what, "A part without labels is of no use: name the others by a pattern.")
            rows.append((place, value))
    table = np.array(pages, np.int64).reshape(-1, len(Page._fields))
    page, start, length = np.array([place[:3] for place, _ in rows], np.int64).reshape(-1, 3).T
    placed = table[page, 0] + start
    if not table[:, 3].any() and (np.diff(placed) >= length[:-1]).all():
        table = table[:0]
    else:
        placed = (np.cumsum(table[:, 2]) - table[:, 2])[page] + start
    found = zip(placed.tolist(), rows, strict=True)
    return [(at, place[2], place[3], value) for at, (place, value) in found], names, table


class _File:
    def __init__(self, url: str, size: int) -> None:
        self.url, self.size = url, size
        self.row, self.place, self.end = 0, 0, 0  # where it is, in bytes too, and the end of the column at hand
        self.first, self.held = 0, b""  # bytes that have been read, and where they begin
        with self._named("is no whole Parquet file"):
            tail = read_range(url, max(size - 8, 0), min(size, 8))
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or not 0 < length <= min(size - 12, _FOOTER):
                raise ValueError("it does not end as one does")
            about = _struct(io.BytesIO(read_range(url, size - 8 - length, length)).read)
            self.schema = _flat(about[2])
            self.groups: list[tuple[int, list[dict[int, Any]]]] = [(each[3], each[1]) for each in about[4]]
            self.texts = {each[1]: each.get(2, b"") for each in about.get(5, ())}
            rows = sum(count for count, _ in self.groups)
            if min((count for count, _ in self.groups), default=0) < 0 or rows * _LEAST > size:
                raise ValueError(f"{rows:,} rows in {size:,} bytes")

    @contextmanager
    def _named(self, what: str = "") -> Iterator[None]:
        """Raise UserError for what can't be read."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = what or f"can't be read at row {self.row:,}"
            raise refused(f"{self.url} {what}: {reason(error)}", REMEDY) from error

    def columns(self, label: str, image: str) -> tuple[_Column, _Column, tuple[str, ...]]:
        """The columns of pictures and of labels, and the classes' names."""
        known = {path: column for path, column in self.schema.items() if column.kind in (_INT32, _INT64, _BYTES)}
        binary = [path for path, column in known.items() if column.kind == _BYTES]
        names = [*dict.fromkeys(path.partition(".")[0] for path in self.schema)]
        with self._named("has damaged metadata of the datasets library"):
            held = json.loads(self.texts.get(b"huggingface") or "{}")
            features = dict(held.get("info", {}).get("features") or {})
            kinds = {name: kind for name, kind in features.items() if isinstance(kind, dict)}
            stated = {name: kind["names"] for name, kind in kinds.items() if kind.get("names")}  # of a ClassLabel
            classes = {name: tuple(class_name(each.strip()) for each in found) for name, found in stated.items()}
        images = [name for name in names if kinds.get(name, {}).get("_type") == "Image"]
        images = images or [name for name in names if f"{name}.bytes" in binary]
        labels = [name for name in names if name in classes] or [name for name in names if name.lower() in LABELS]
        found = column_of(f"shards:{self.url}", "image", image or None, images, names)
        of_label = column_of(f"shards:{self.url}", "label", label or None, labels, names)
        of_image = f"{found}.bytes" if f"{found}.bytes" in self.schema else found
        if of_image not in binary or of_label not in known:
            what = f"{self.url}: {of_image} or {of_label} is no column of pictures' bytes, or of whole numbers or names"
            raise refused(what, f"Name others by :image=COLUMN and :label=COLUMN. It has {', '.join(self.schema)}.")
        class_names = classes.get(of_label, ())
        if len(set(class_names)) < len(class_names) or not all(each.isprintable() and each for each in class_names):
            raise refused(f"{self.url}: a class has no name, or another one's", REMEDY)
        return known[of_image], known[of_label], class_names

    def values(self, group: int, column: _Column, decode: Decode, table: list[Page], first: int) -> Iterator[Any]:
        """The values of a row group's column from row `first` on, None where there is none; pages go to the table."""
        self.row, end, known = first, first + self.groups[group][0], list[Any]()
        for head, page in self._pages(group, column):
            with self._named():
                second, about = head[1] == _DATA_2, head[{_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}[head[1]]]
                count, encoding, levels, at = about[1], about[4 if second else 2], b"", 0
                if second:  # levels lie before what is compressed
                    levels = self._take(about[5])
                    rest = page.stored - about[5], page.size - about[5], page.codec if about.get(7, True) else 0
                    page = Page(page.place + about[5], *rest)
                body = unpacked(self._take(page.stored), max(page.size, 0), page.codec)
                most = page.size if head[1] == _DICTIONARY else end - self.row
                if len(body) != page.size or not 0 <= count <= most:
                    raise ValueError(f"a page of {count:,} values and {len(body):,} bytes")
                table.append(page)
                if head[1] == _DICTIONARY:
                    known = [*decode(len(table) - 1, body, 0, count)]
                    continue
                if not second and column.levels:
                    at = 4 + int.from_bytes(body[:4], "little")
                    levels = body[4:at]
                there = _runs(levels, column.levels.bit_length(), count) == column.levels
                if encoding in _BY_NUMBER:
                    picks = _runs(body[at + 1 :], body[at] if there.any() else 0, int(there.sum()))
                    found = iter([known[k] for k in picks.tolist()])
                elif encoding == _PLAIN:
                    found = iter(decode(len(table) - 1, body, at, int(there.sum())))
                else:
                    raise ValueError(f"it is written by encoding {encoding}, and not as PLAIN")
                values = [next(found) if each else None for each in there.tolist()]
            yield from values
            self.row += count
        with self._named():
            if self.row != end:
                raise ValueError(f"row group {group} has {self.row - first:,} of {end - first:,} rows")

    def _pages(self, group: int, column: _Column) -> Iterator[tuple[dict[int, Any], Page]]:
        """The pages of a column of a row group, whose headers have just been read."""
        with self._named():
            chunk = self.groups[group][1][column.number][3]
            place = min(chunk[field] for field in (9, 11) if chunk.get(field))
            end = min(place + chunk[7], self.size)
            if chunk[4] not in _CODECS:
                raise ValueError(f"it is compressed by method {chunk[4]}, and not by snappy, zstd, gzip or brotli")
        while place < end:
            with self._named():
                self.place, self.end = place, end
                head = _struct(self._take)
                place, size, stored = self.place, head[2], head[3]
                if not (0 <= stored <= end - place and 0 <= size <= max(_FREE, min(_LARGEST, stored * _RATIO))):
                    raise ValueError(f"a page of {stored:,} bytes, which are {size:,} unpacked")
            yield head, Page(place, stored, size, chunk[4])
            place += stored

    def _take(self, count: int) -> bytes:
        """The next bytes of the column at hand."""
        start, self.place = self.place, self.place + count
        if not 0 <= start <= self.place <= self.end:
            raise ValueError("it ends in the midst of a page")
        if start < self.first or self.place > self.first + len(self.held):
            self.first, self.held = start, read_range(self.url, start, min(max(count, CHUNK), self.end - start))
        return self.held[start - self.first : self.place - self.first]


def _plain(body: bytes, at: int, count: int) -> Iterator[tuple[int, int]]:
    """Where values begin and end, each behind its length."""
    for _ in range(count):
        start = at + 4
        at = start + int.from_bytes(body[at:start], "little")
        if at > len(body):
            raise ValueError("a value is longer than its page")
        yield start, at


def _places(page: int, body: bytes, at: int, count: int) -> Iterator[Place]:
    return ((page, start, end - start, content_words(body[start:end])) for start, end in _plain(body, at, count))


def _labels(kind: int, page: int, body: bytes, at: int, count: int) -> Iterable[Any]:  # noqa: ARG001
    if kind != _BYTES:
        return [*map(int, np.frombuffer(body, "<i4" if kind == _INT32 else "<i8", count, at))]
    return [body[start:end].decode() for start, end in _plain(body, at, count)]


def _runs(data: bytes, width: int, count: int) -> Array:
    """Whole numbers of so many bits, in runs of one number or packed in eights, int64 [count]."""
    stream, found, have = io.BytesIO(data), [np.empty(0, np.int64)], 0
    if not 0 < width <= 32:
        return np.full(count, 1 << 40 if width else 0)  # what is no number, or 0
    while have < count:
        head = _varint(stream.read)
        if head & 1:
            packed = np.frombuffer(stream.read(min(head >> 1, -(-(count - have) // 8)) * width), np.uint8)
            run = np.unpackbits(packed, bitorder="little").reshape(-1, width) @ (1 << np.arange(width))
        else:
            value = int.from_bytes(stream.read(-(-width // 8)), "little")
            run = np.full(min(head >> 1, count - have), value, np.int64)
        if not len(run):
            raise ValueError("a page has fewer values than it says")
        found.append(run[: count - have])
        have += len(found[-1])
    return np.concatenate(found)


# ---- Thrift's compact protocol


def _varint(take: Callable[[int], bytes]) -> int:
    value = shift = 0
    while (byte := take(1)[0]) & 128:
        value, shift = value | (byte & 127) << shift, shift + 7
        if shift > 63:
            raise ValueError("a number has no end")
    return value | byte << shift


def _struct(take: Callable[[int], bytes], depth: int = 0) -> dict[int, Any]:
    """A struct, by its fields' numbers."""
    found: dict[int, Any] = {}
    field = 0
    while byte := take(1)[0]:
        field = field + (byte >> 4) if byte >> 4 else _varint(take) >> 1
        found[field] = byte & 15 == 1 if byte & 15 < 3 else _value(take, byte & 15, depth)
    return found


def _value(take: Callable[[int], bytes], kind: int, depth: int) -> Any:
    """A value of a kind: 3 a byte, 4 to 6 whole numbers, 7 a double, 8 bytes, 9 and 10 lists, 12 a struct."""
    if kind in (4, 5, 6):
        value = _varint(take)
        return value >> 1 ^ -(value & 1)
    if kind in (9, 10) and depth < 8:
        byte = take(1)[0]
        count = byte >> 4 if byte >> 4 < 15 else _varint(take)
        return [_value(take, byte & 15, depth + 1) for _ in range(count)]
    if kind == 12 and depth < 8:
        return _struct(take, depth + 1)
    length = _varint(take) if kind == 8 else {1: 1, 2: 1, 3: 1, 7: 8}[kind]
    if len(data := take(length)) != length:
        raise ValueError("a header is cut")
    return data


def _flat(schema: list[dict[int, Any]]) -> dict[str, _Column]:
    """The columns by their paths."""
    found: dict[str, _Column] = {}
    nodes = [[schema[0][5], "", 0, False]]  # columns that follow, path, levels, whether it is repeated
    for each in schema[1:]:
        while not nodes[-1][0]:
            nodes.pop()
        nodes[-1][0] -= 1
        _, path, levels, repeated = nodes[-1]
        path += "." * bool(path) + each[4].decode()
        levels, repeated = levels + (each.get(3, 0) != 0), repeated or each.get(3) == 2
        if each.get(5):
            nodes.append([each[5], path, levels, repeated])
        else:
            found[path] = _Column(len(found), -1 if repeated else each[1], levels)
    return found
