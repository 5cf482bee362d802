"""Pictures that others have listed: `--dataset table:FILE`, `hf:NAME` of the datasets library, torchvision's `tv:NAME`.

An adapter finds the parts to train and to validate on, and makes a set of each: its labels, and a `Source` of pictures.
"""

import codecs
import csv
import hashlib
import inspect
import io
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from lockstep.config import DataConfig
from lockstep.config.data import kind_of, parse_source
from lockstep.data.folders import held_split, split_of
from lockstep.data.image_sets import Ids, numbered
from lockstep.data.picture_set import Files, PictureSet, class_name, refused
from lockstep.distributed.files import named
from lockstep.distributed.world import World
from lockstep.errors import PeerError, reason, refusal, shown, unknown

TO_TRAIN_ON = {  # what to do where no part is
    "table": "Give rows to train on the split train, or leave out its column of splits.",
    "hf": "Say which: train=PART,val=PART behind its name.",
    "shards": "If all are meant, name them by a pattern, as 'FOLDER/*.tar'.",
}
Sets = tuple[PictureSet, PictureSet | None]  # to train on, and to validate on where the source has such a part
_COLUMNS = {
    "path": ("path", "file", "image", "filename", "file_name", "filepath", "image_path"),
    "label": ("label", "class", "target", "class_name"),
    "split": ("split",),
}
_SEPARATORS = ",\t;|"
_MARKS = {  # UTF-32's first: it begins with UTF-16's
    **dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32"),
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16"), codecs.BOM_UTF8: "utf-8-sig",
}  # fmt: skip
_SHOWN = 3
# torchvision: what to train and to validate on, by `split`; "": the set has one part, or an argument `train`
_TORCHVISION = {
    **dict.fromkeys(("Caltech101", "Caltech256", "EuroSAT", "SEMEION", "SUN397"), ("", "")),
    **dict.fromkeys(("FashionMNIST", "KMNIST", "MNIST", "QMNIST", "USPS"), ("", "")),
    **dict.fromkeys(("FER2013", "Food101", "GTSRB", "LFWPeople", "STL10", "SVHN", "StanfordCars"), ("train", "test")),
    **dict.fromkeys(("CLEVRClassification", "DTD", "FGVCAircraft", "Flowers102"), ("train", "val")),
    **dict.fromkeys(("Imagenette", "RenderedSST2"), ("train", "val")),
    "Country211": ("train", "valid"),
    "OxfordIIITPet": ("trainval", "test"),
    "Places365": ("train-standard", "val"),
}
_OURS = {  # torchvision's come as pickles, which may run code
    **{"CIFAR10": "--dataset cifar10", "CIFAR100": "--dataset cifar100"},
    "ImageNet": "class folders of it: lockstep train imagenet --data-dir DIR",
}


def load_adapted(data: DataConfig, data_dir: Path, world: World) -> Sets:
    """The sets of a `table:`, `hf:` or `tv:` name. All ranks call it together: the first of each host downloads.
    Raises UserError for what can't be had or read, and PeerError on ranks whose host's first one failed.
    """
    kind = kind_of(data.dataset)
    if kind == "table":
        return _table(data, data_dir)
    return (_hub if kind == "hf" else _torchvision)(data, data_dir, world)


@dataclass(frozen=True)
class Rows:
    """Rows of another library's data set, which need no files of their own: a `Source`."""

    name: str
    table: Any
    fetch: Callable[[Any, int], bytes]  # a picture as it is stored, of a row of the table
    numbers: Ids  # int64 [n], each sample's row
    sizes: Ids | None = None  # int64 by row, in bytes, where they are known without reading
    file: str = ""  # the newest of those that hold the rows
    content: str = ""  # a digest of what the table holds, where sizes are not known

    def key(self, sample: int) -> str:
        """The row's number."""
        return str(self.numbers[sample])

    def where(self, sample: int) -> str:
        """As hf:NAME[7]."""
        return f"{self.name}[{self.numbers[sample]}]"

    def stat(self, sample: int) -> tuple[int | None, int, int, int]:
        """Bytes, and the times of the file that holds the rows: who rewrites one, changes them."""
        found = Path(self.file).stat() if self.file else None
        times = (0, 0, 0) if found is None else (found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        return None if self.sizes is None else int(self.sizes[self.numbers[sample]]), *times

    def read(self, sample: int) -> bytes:
        """The picture as it is stored."""
        return self.fetch(self.table, int(self.numbers[sample]))

    def take(self, ids: Ids) -> Self:
        """These samples alone, numbered in their order."""
        return replace(self, numbers=self.numbers[ids])


def _cut(text: str) -> str:
    """Of a table's text what fits into a message."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def _column(name: str, what: str, wanted: str | None, candidates: Sequence[str], columns: Collection[str]) -> str:
    """The column for something: the one that the user names, else the only candidate."""
    have = ", ".join(map(_cut, [*columns][:8])) + (", ..." if len(columns) > 8 else "")
    if wanted is not None and wanted not in columns:
        raise refused(f"{name} has no column {_cut(wanted)}", f"It has {have}.")
    if wanted is None and len(candidates) != 1:
        several = f"the columns {' and '.join(map(_cut, candidates))} could each be" if candidates else "no column is"
        raise refused(f"{name}: {several} the {what} among {have}", f"Say which: --dataset {name}:{what}=COLUMN.")
    return candidates[0] if wanted is None else wanted


def _parts(
    name: str, parts: Sequence[str], options: dict[str, str], val_fraction: float
) -> tuple[str, str, tuple[str, ...]]:
    """The part to train on, that to validate on ("": none), and a note on them where there are several."""
    have = ", ".join(map(_cut, parts))
    for part in (options[key] for key in ("train", "val") if key in options):
        if part not in parts:
            raise refused(f"{name} has no part {_cut(part)}", f"It has {have}.")
    found = {split: part for part in reversed(parts) if (split := split_of(part))}
    train = options.get("train") or found.get("train") or (parts[0] if len(parts) == 1 else "")
    if not train:
        raise refused(f"{name} has no part to train on among {have}", TO_TRAIN_ON[kind_of(name)])
    others = {split: part for split, part in found.items() if part != train}
    val = options.get("val") or others.get(held_split(others, val_fraction), "")
    return train, val, _used(name, train, val, sorted(set(parts) - {train, val}))


def _used(name: str, train: str, val: str, left: Sequence[str]) -> tuple[str, ...]:
    """A line on what its parts are for; none where it has one alone."""
    if not (val or left):
        return ()
    held = f", to validate on {val}" if val else ""
    rest = f"; left for the end: {', '.join(left)}" if left else ""
    return (f"{name}: to train on its part {train}{held}{rest}",)


def _matched(val: PictureSet, train: PictureSet) -> PictureSet:
    """The part to validate on with the classes of that to train on, by their names."""
    if val.classes == train.classes:
        return val
    if strange := [each for each in val.classes if each not in train.classes]:
        listed = ", ".join(map(_cut, strange[:_SHOWN])) + (", ..." if len(strange) > _SHOWN else "")
        what = f"{val.name}: the part to validate on has classes that are not among those to train on: {listed}"
        raise refused(what, "Give them the same names there, or use the set by a package.module:factory of your own.")
    places = np.array([train.classes.index(each) for each in val.classes], np.int64)
    return replace(val, classes=train.classes, labels=places[val.labels])


# ---- tables


@dataclass(frozen=True)
class Row:
    """A picture of a table; `where`: its line, for messages."""

    where: str
    path: str
    labels: tuple[str, ...]  # one, or with the option `separator` any number
    split: str  # train, val or test


def _table(data: DataConfig, data_dir: Path) -> Sets:
    """The pictures of a table of (path, label[, split]); relative paths start at its folder."""
    name, options = parse_source(data.dataset, (*_COLUMNS, "separator"))
    file = next((path.absolute() for path in (named(name), data_dir / name) if path.is_file()), None)
    if file is None:
        raise refused(f"there is no table {named(name).absolute()} or {data_dir / name}", "As table:FILE.csv.")
    rows = read_rows(file, options)
    by_split = {split: [row for row in rows if row.split == split] for split in ("train", "val", "test")}
    splits = [split for split, part in by_split.items() if part]
    first, second, notes = _parts(f"table:{file}", splits, {}, data.val_fraction)
    train, val = by_split[first], by_split.get(second, [])
    classes = tuple(sorted({label for row in train for label in row.labels}))
    if not classes:
        raise refused(f"the table {file} has no label in any row", "Write the classes into its column of labels.")
    number = {label: k for k, label in enumerate(classes)}
    for row in val:
        if strange := [label for label in row.labels if label not in number]:
            what = f"{row.where}: the class {_cut(strange[0])} is not among those to train on"
            raise refused(what, "Give it rows to train on, or leave it out.")
    used = [*train, *val]
    others = [row for row in rows if row.split not in (first, second)]  # what is wrong with them is said now, too
    paths, sets = _paths(file, [*used, *others], data.follow_links)[: len(used)], None
    labels = [[number[label] for label in row.labels] for row in used]
    if "separator" in options:
        numbers, sets = numbered(labels, len(classes))
    else:
        numbers = np.array(labels, np.int64)[:, 0]
    entries, cut = list(zip(numbers.tolist(), paths, strict=True)), len(train)
    made = [
        PictureSet(str(file), classes, *_sorted(file.parent, part), label_sets=sets)
        for part in (entries[:cut], entries[cut:])
    ]
    return replace(made[0], notes=notes, split=first), made[1] if val else None


def _sorted(root: Path, entries: Sequence[tuple[int, str]]) -> tuple[Ids, Files]:
    """Labels and files in the order of classes and paths, whatever the order of the list."""
    ordered = sorted(entries)
    labels = np.array([label for label, _ in ordered], np.int64)
    return labels, Files(root, [os.fsencode(path) for _, path in ordered])


def read_rows(file: Path, options: dict[str, str]) -> list[Row]:
    """The rows of a table in their order. `options`: columns by what they are for, where the user has said so.
    Raises UserError for a file that is no table, columns that aren't there or could be several, and empty entries; it
    names the line.
    """
    try:
        lines = list(_lines(file))
    except OSError as error:
        raise refused(
            f"the table {file} can't be read: {refusal(error)}", "Name a file: --dataset table:FILE.csv."
        ) from error
    if len(lines) < 2:
        raise refused(f"the table {file} has no rows", "Its first line names the columns, each other one a picture.")
    names = [name.strip() for name in lines[0][1]]
    if len(names) == 1:
        what = f"the table {file} has one column: {_cut(names[0])}"
        raise refused(what, "It needs one of paths and one of labels: put commas, tabs, ; or | between fields.")
    places = {}
    for what, usual in _COLUMNS.items():
        candidates = [name for name in names if name.lower() in usual]
        if candidates or what != "split" or what in options:
            places[what] = names.index(_column(f"table:{file}", what, options.get(what), candidates, names))
    rows = [
        _row(f"the table {file}, line {line}", values, len(names), places, options.get("separator", ""))
        for line, values in lines[1:]
    ]
    if (halves := {bool(row.split): row for row in rows}).keys() == {True, False}:
        raise refused(f"{halves[False].where}: the split is ''", "It is train, val or test.")
    return rows if rows[0].split else [replace(row, split="train") for row in rows]


def _row(where: str, values: list[str], count: int, places: dict[str, int], separator: str) -> Row:
    what, remedy = "", "Fill it in, or leave the row out."
    field = {key: values[place].strip() for key, place in places.items() if place < len(values)}
    if len(values) != count:
        what = f"{len(values)} field(s), and the first line has {count}"
        remedy = 'A field with a comma or a line break stands in "quotes".'
    elif not field["path"] or "\0" in field["path"]:
        what = "no path" if not field["path"] else f"the path {_cut(field['path'])} has a zero byte"
    elif shown(field["label"]) != field["label"] or not (field["label"] or separator):
        what = f"the label {_cut(field['label'])} has a line break or the like" if field["label"] else "no label"
    elif field.get("split") and not split_of(field["split"]):
        what, remedy = f"the split is {_cut(field['split'])!r}", "It is train, val or test."
    if what:
        raise refused(f"{where}: {what}", remedy)
    labels = field["label"].split(separator) if separator else [field["label"]]
    found = tuple(class_name(label.strip()) for label in labels if label.strip())
    return Row(where, field["path"], found, split_of(field.get("split", "")))


def _lines(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines of a table with their numbers, each as its fields: with commas, tabs, semicolons or pipes."""
    text = _text(file)
    first, _, rest = text.partition("\n")
    separator = max(_SEPARATORS, key=re.sub('"[^"]*"', "", first).count)
    if len(stated := first.strip()) == 5 and stated.startswith("sep="):  # a spreadsheet's own line
        separator, text = stated[4], f"\n{rest}"
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    begin = 1
    try:
        for values in reader:
            if values:  # else an empty line
                yield begin, values
            begin = reader.line_num + 1
    except csv.Error as error:
        raise refused(
            f"the table {file} is damaged in the row that begins at line {begin}: {_cut(str(error))}",
            'A field with a comma, a quote or a line break stands in "quotes", and a quote in it twice.',
        ) from error


def _text(file: Path) -> str:
    """A table's text: UTF-8, or UTF-16 as spreadsheets write it."""
    raw = file.read_bytes()
    if kind := {b"PAR1": "parquet file", b"PK\x03\x04": "workbook"}.get(raw[:4]):
        raise refused(f"the table {file} is a {kind}", "Save it as CSV; pictures inside it are read by hf:FOLDER.")
    encoding = next((each for mark, each in _MARKS.items() if raw.startswith(mark)), "utf-8")
    zeros = [raw[start:400:2].count(0) for start in (0, 1)]  # every other byte of UTF-16 is mostly zero
    if encoding == "utf-8" and max(zeros) > len(raw[:400]) / 4:
        encoding = "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise refused(
            f"the table {file} is not {encoding.upper()}: line {line} has the byte {raw[error.start]:#x}",
            "Save it as UTF-8: in a spreadsheet 'CSV UTF-8'; by hand `iconv -f latin1 -t utf8`, or from gb18030, ...",
        ) from error


def _paths(file: Path, rows: Sequence[Row], follow_links: bool) -> list[str]:
    """Each row's path from the table's folder, or the whole one of a file elsewhere."""
    root, real = str(file.parent), os.path.realpath(file.parent)
    folders: dict[str, str] = {}  # real paths: files share theirs
    lines: dict[str, str] = {}  # path -> where it stands
    missing: list[str] = []
    for row in rows:
        path = os.path.normpath(file.parent / row.path)
        key = os.path.relpath(path, root) if path.startswith(f"{root}{os.sep}") else path
        if key in lines:
            what = f"{row.where}: {_cut(key)} stands there twice, also in {lines[key].rpartition(', ')[2]}"
            raise refused(what, "Leave one of the two out; a picture has one label here.")
        lines[key] = row.where
        folder, place = path.rpartition(os.sep)[0], ""  # the real one that holds the file's bytes
        folders[folder] = folders.get(folder) or os.path.realpath(folder)
        with suppress(OSError, ValueError):  # a name that is too long, a file where a folder should be
            if Path(path).is_file():
                place = os.path.realpath(path) if Path(path).is_symlink() else folders[folder]
        if not place:
            missing.append(f"{row.where.rpartition(', ')[2]}: {_cut(row.path)}")
        elif not follow_links and not Path(place).is_relative_to(real):
            what = f"{row.where}: {_cut(row.path)} lies outside of {root}"
            raise refused(what, "Give --follow-links if that is meant, or put table and pictures into one folder.")
    if missing:
        more = f", and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
        slashes = "Write paths with /, not with a backslash. " if "\\" in missing[0] else ""
        what = (
            f"the table {file} names {len(missing):,} file(s) that are not there: {', '.join(missing[:_SHOWN])}{more}"
        )
        raise refused(what, f"{slashes}Relative paths start at {root}.")
    return [*lines]


# ---- the datasets library


def _hub(data: DataConfig, data_dir: Path, world: World) -> Sets:
    """NAME is a folder, from here or from the data folder, that `save_to_disk` wrote or that holds parquet files or
    class folders; or else a name on the hub.
    """
    name, options = parse_source(data.dataset, ("image", "label", "train", "val", "config"))
    folder = next((path for path in (named(name), data_dir / name) if path.is_dir()), None)
    try:
        with world.first_on_host():
            import datasets

            if folder is not None and any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
                found = datasets.load_from_disk(str(folder))
            else:
                found = datasets.load_dataset(str(folder.absolute()) if folder else name, options.get("config"))
    except ImportError as error:
        raise refused(f"hf:{name} needs {error.name or 'datasets'}", "pip install 'lockstep-torch[hf]'") from error
    except PeerError:
        raise
    except Exception as error:  # of the library, its own libraries and the network: no common type
        if folder is not None:
            what = f"hf:{name}: the folder {folder} can't be read as a data set: {reason(error)}"
            raise refused(what, "It holds what save_to_disk wrote, parquet files, or class folders.") from error
        raise refused(
            f"hf:{name} is no folder here and can't be had from the hub: {reason(error)}",
            f"On a machine with a network run `python -c \"import datasets; datasets.load_dataset('{name}')"
            ".save_to_disk('DIR')\"`, copy DIR here and give --dataset hf:DIR.",
        ) from error
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    first, second, notes = _parts(f"hf:{name}", [*parts], options, data.val_fraction)
    train = _hub_set(f"hf:{name}", parts[first], options)
    val = _matched(_hub_set(f"hf:{name}", parts[second], options, train.classes), train) if second else None
    return replace(train, notes=notes, split="" if "train" in options else split_of(first)), val


def _hub_set(name: str, part: Any, options: dict[str, str], known: tuple[str, ...] = ()) -> PictureSet:
    """A part as a set. `known`: the classes of the part to train on."""
    import datasets

    features = dict(part.features)
    of_classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    by_name = [key for key in features if key.lower() in (*_COLUMNS["label"], "labels")]
    images = [key for key, kind in features.items() if isinstance(kind, datasets.Image)]
    image = _column(name, "image", options.get("image"), images, features)
    label = _column(name, "label", options.get("label"), of_classes or by_name, features)
    kind = features[label]
    dtype = "int" if label in of_classes else kind.dtype if isinstance(kind, datasets.Value) else ""
    if not re.match("(large_)?string|bool|u?int|float", dtype):
        what = f"{name}: the column {_cut(label)} holds no classes: it is {_cut(str(kind))}"
        raise refused(what, f"Name one of class labels, text or numbers: {name}:label=COLUMN.")
    values, names = list(part[label]), getattr(kind, "names", None)
    if not values:
        raise refused(f"{name} has a part without rows", "Name another: train=PART,val=PART behind its name.")
    texts = ["" if value is None else class_name(str(value)) for value in values]
    classes = tuple(class_name(str(each)) for each in names or ()) or known or tuple(sorted({*texts} - {""}))
    places = {str(k) if names else text: k for k, text in enumerate(classes)}
    if bad := [row for row, text in enumerate(texts) if text not in places]:
        what = f"{name}: row {bad[0]} has the label {_cut(str(values[bad[0]]))}, which is no class to train on"
        raise refused(what, "A part without labels is of no use: name others, as train=PART,val=PART.")
    try:
        table = part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        sizes = _sizes(table)
    except Exception as error:  # of pyarrow and of the library
        raise refused(
            f"{name}: the column {_cut(image)} holds no pictures: {reason(error)}", f"Say which: {name}:image=COLUMN."
        ) from error
    files = [file["filename"] for file in table.cache_files]
    newest = str(max(files, key=lambda file: Path(file).stat().st_mtime_ns)) if files else ""
    rows = Rows(name, table, _fetched, np.arange(len(values), dtype=np.int64), sizes, newest)
    return PictureSet(name, classes, np.array([places[text] for text in texts], np.int64), rows)


def _sizes(table: Any) -> Ids:
    """Bytes of each picture, int64 [n], from the table's offsets, or of the file that it names."""
    from pyarrow import compute

    sizes: list[int] = []
    for batch in table.with_format("arrow").iter(1000):
        lengths = compute.binary_length(compute.struct_field(batch.column(0), "bytes")).to_pylist()
        files = compute.struct_field(batch.column(0), "path").to_pylist()
        for length, file in zip(lengths, files, strict=True):
            sizes.append(Path(file).stat().st_size if length is None and file else length or 0)
    return np.array(sizes, np.int64)


def _fetched(table: Any, row: int) -> bytes:
    """A picture of the table, or the file that it names; nothing where the row has none, as of an empty file."""
    (held,) = table[row].values()
    content, file = (held["bytes"], held["path"]) if held else (b"", "")
    return Path(file).read_bytes() if content is None and file else content or b""


# ---- torchvision's sets


def torchvision_sets() -> list[str]:
    """The names that this torchvision has."""
    from torchvision import datasets

    return [name for name in _TORCHVISION if hasattr(datasets, name)]


def _torchvision(data: DataConfig, data_dir: Path, world: World) -> Sets:
    """Below the data folder, and by torchvision's own checksums."""
    from torchvision import datasets

    name, options = parse_source(data.dataset, ("train", "val"))
    if name in _OURS:
        raise refused(f"--dataset {data.dataset}: torchvision reads it by pickle", f"Use {_OURS[name]}.")
    if name not in (known := torchvision_sets()):
        same = [each for each in known if each.lower() == name.lower()]
        raise unknown("classification set of torchvision:", name, same or known)
    splits = options.get("train", _TORCHVISION[name][0]), options.get("val", _TORCHVISION[name][1])
    if options and not _TORCHVISION[name][0]:
        raise refused(f"--dataset {data.dataset}: tv:{name} has no parts to choose from", "Leave train= and val= out.")
    kind = getattr(datasets, name)
    takes = inspect.signature(kind.__init__).parameters
    parts: list[dict[str, Any]] = [{"split": part} for part in splits] if splits[0] else [{}]
    parts = [{"train": True}, {"train": False}] if "train" in takes and not splits[0] else parts
    first, second = splits[0] or "train", splits[1] or "test"
    notes = _used(f"tv:{name}", first, second, ()) if parts[1:] else ()
    if parts[1:] and "val" not in options and not held_split({split_of(second)}, data.val_fraction):
        parts, notes = parts[:1], _used(f"tv:{name}", first, "", [second])
    try:
        with world.first_on_host():
            download = {"download": world.local_rank == 0} if "download" in takes or "kwargs" in takes else {}
            found = [kind(data_dir, **part, **download) for part in parts]
    except ImportError as error:
        raise refused(f"tv:{name} needs {error.name or reason(error)}", f"pip install {error.name or ''}") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise refused(
            f"tv:{name} is not in {data_dir} and can't be had from here, or is damaged: {reason(error)}",
            f"On a machine with a network run `python -c \"import torchvision; torchvision.datasets.{name}('DIR', "
            'download=True)"` and copy DIR here as --data-dir; what is damaged, remove first.',
        ) from error
    train, *rest = [_torchvision_set(f"tv:{name}", part, data_dir) for part in found]
    return replace(train, notes=notes), _matched(rest[0], train) if rest else None


def _torchvision_set(name: str, part: Any, data_dir: Path) -> PictureSet:
    count = len(part)

    def attribute(*names: str) -> Any:
        held: list[Any] = [getattr(part, each, None) for each in names]
        return next((each for each in held if hasattr(each, "__len__") and len(each) == count and count), None)

    found, files = attribute("_labels", "targets", "labels", "y"), attribute("_image_files", "_images", "data")
    pairs = attribute("_samples", "samples", "imgs")  # of a file, and a label
    if pairs is not None and isinstance(pairs[0], tuple | list) and len(pairs[0]) == 2:
        files = [pair[0] for pair in pairs]
        found = [pair[1] for pair in pairs] if found is None else found
    if found is None:
        found = [part[row][1] for row in range(count)]  # reads every picture
    labels, names = np.asarray(found).astype(np.int64), getattr(part, "classes", getattr(part, "categories", None))
    if not names or labels.min() < 0 or labels.max() >= len(names):
        names, labels = np.unique(labels, return_inverse=True)
    classes = tuple(", ".join(each) if isinstance(each, tuple | list) else str(each) for each in names)
    for row in np.unique(np.linspace(0, count - 1, _SHOWN).astype(int)).tolist():
        image, label = part[row]
        if not hasattr(image, "convert") or label != found[row]:
            what = f"{name}: its sample {row} is ({type(image).__name__}, {label}), not a picture of class {found[row]}"
            raise refused(what, "Use it by a package.module:factory of your own.")
    if files is None or not isinstance(files[0], str | os.PathLike):
        held = np.asarray(part.data) if hasattr(part, "data") else np.empty(0)
        digest = hashlib.sha256(np.ascontiguousarray(held).tobytes()).hexdigest() if held.dtype != object else ""
        rows = Rows(name, part, as_file, np.arange(count, dtype=np.int64), content=digest)
        return PictureSet(name, classes, labels, rows)
    paths = [os.path.relpath(file, data_dir) for file in files]  # some sets list their folders unsorted
    return PictureSet(name, classes, *_sorted(data_dir, list(zip(labels.tolist(), paths, strict=True))))


def as_file(dataset: Any, row: int) -> bytes:
    """A row (PIL image, label) as an uncompressed file, whose decoder gives the same pixels."""
    buffer = io.BytesIO()
    image = dataset[row][0]
    (image if image.mode in ("L", "RGB") else image.convert("RGB")).save(buffer, "PPM")
    return buffer.getvalue()
