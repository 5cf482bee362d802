"""Sets of the `datasets` library: `--dataset hf:NAME`, by their name on the hub or by a local folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.arrays import Ids
from lockstep.data.folder import joined
from lockstep.data.held import HeldSet
from lockstep.data.named import parse
from lockstep.data.rows import COLUMNS, shown
from lockstep.errors import UserError, reason
from lockstep.processes.world import World

_OPTIONS = ("image", "label", "train", "val", "config")
_TO_VALIDATE = ("validation", "val", "valid", "dev", "test")
_AT_ONCE = 1000  # rows whose sizes are asked for


def load_hub(
    dataset: str, data_dir: Path, size: int, seed: int, resized_crop: bool, world: World
) -> tuple[HeldSet, HeldSet | None]:
    """The parts to train and to validate on; None: the set has one part. All ranks call it together.

    NAME is a folder, from here or from the data folder, that `save_to_disk` wrote or that holds parquet files or class
    folders; or else a name on the hub, which the first process of each host downloads while the others wait.

    Raises:
        UserError: for a set that can't be had, and one whose pictures or classes can't be told.
        PeerError: on the waiting ranks, where a host's first rank failed.
    """
    name, given = parse(dataset, _OPTIONS)
    folder = next((path for path in (Path(name).expanduser(), data_dir / name) if path.is_dir()), None)
    with world.first_on_host(), _told(name, folder):
        parts = _opened(name, folder, given.get("config"))
    chosen = _chosen(f"hf:{name}", list(parts), given)
    train = _as_set(f"hf:{name}", parts[chosen[0]], given, data_dir, size, seed, resized_crop, ())
    if len(chosen) == 1:
        return train, None
    val = _as_set(f"hf:{name}", parts[chosen[1]], given, data_dir, size, seed, False, train.classes)
    rest = ", ".join(sorted(set(parts) - set(chosen)))
    note = f"hf:{name}: to train on its part {chosen[0]}, to validate on {chosen[1]}"
    return replace(train, notes=(f"{note}; left for the end: {rest}" if rest else note,)), val


def _opened(name: str, folder: Path | None, config: str | None) -> dict[str, Any]:
    """The set's parts by name; a set without names of parts is one."""
    import datasets

    if folder is not None and any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
        made = datasets.load_from_disk(str(folder))
    else:
        made = datasets.load_dataset(name if folder is None else str(folder.absolute()), config)
    return dict(made) if isinstance(made, dict) else {"train": made}


@contextmanager
def _told(name: str, folder: Path | None) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(f"hf:{name} needs {error.name or 'datasets'}", "pip install 'lockstep-torch[hf]'") from error
    except Exception as error:  # of the library, its own libraries and the network: no common type
        if folder is not None:
            raise UserError(
                f"hf:{name}: the folder {folder} can't be read as a data set: {reason(error)}",
                "It holds what save_to_disk wrote, parquet files, or class folders of pictures.",
            ) from error
        raise UserError(
            f"hf:{name} is no folder here and can't be had from the hub: {reason(error)}",
            f"On a machine with a network run `python -c \"import datasets; datasets.load_dataset('{name}')"
            ".save_to_disk('DIR')\"`, copy DIR here and give --dataset hf:DIR.",
        ) from error


def _chosen(name: str, parts: list[str], given: dict[str, str]) -> list[str]:
    """The parts to train and to validate on; of a set with one part that alone."""
    for part in (given[key] for key in ("train", "val") if key in given):
        if part not in parts:
            raise UserError(f"{name} has no part {shown(part)}", f"It has {', '.join(map(shown, parts))}.")
    train = given.get("train") or ("train" if "train" in parts else parts[0])
    val = given.get("val") or next((part for part in _TO_VALIDATE if part in parts and part != train), None)
    if "train" not in parts and "train" not in given and len(parts) > 1:
        raise UserError(
            f"{name} has no part to train on among {', '.join(map(shown, parts))}",
            f"Say which: --dataset {name}:train=PART,val=PART.",
        )
    return [train] if val is None else [train, val]


def _as_set(
    name: str,
    part: Any,
    given: dict[str, str],
    data_dir: Path,
    size: int,
    seed: int,
    resized_crop: bool,
    known: tuple[str, ...],
) -> HeldSet:
    """A part as a set. `known`: the classes of the part to train on."""
    import datasets

    features = dict(part.features)
    image = _column(name, "image", given, [key for key, kind in features.items() if isinstance(kind, datasets.Image)])
    label = _column(name, "label", given, _label_columns(features, datasets))
    for column in (image, label):
        if column not in features:
            raise UserError(f"{name} has no column {shown(column)}", f"It has {', '.join(map(shown, features))}.")
    labels, classes = _labels(name, list(part[label]), features[label], known)
    try:
        source = part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        sizes = _sizes(source)
    except Exception as error:  # of pyarrow and of the library
        raise UserError(
            f"{name}: the column {shown(image)} holds no pictures: {reason(error)}", f"Say which: {name}:image=COLUMN."
        ) from error
    paths, ends = joined([str(row).encode() for row in range(len(labels))])
    return HeldSet(
        data_dir, classes, size, seed, resized_crop, paths, ends, labels,
        called=name, source=source, fetch=_stored, sizes=sizes, file=_newest(source),
    )  # fmt: skip


def _label_columns(features: dict[str, Any], datasets: Any) -> list[str]:
    """The columns that may be the label: those of classes, or else by their names."""
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    return classes or [key for key in features if key.lower() in (*COLUMNS["label"], "labels")]


def _column(name: str, what: str, given: dict[str, str], found: list[str]) -> str:
    if what in given:
        return given[what]
    if len(found) != 1:
        several = f"the columns {' and '.join(map(shown, found))} could each be" if found else "no column is"
        raise UserError(f"{name}: {several} the {what}", f"Say which: --dataset {name}:{what}=COLUMN.")
    return found[0]


def _labels(name: str, values: list[Any], feature: Any, known: tuple[str, ...]) -> tuple[Ids, tuple[str, ...]]:
    """Labels int64 [n] and the classes' names: those of the feature, or of the values, sorted."""
    if not values:
        raise UserError(f"{name} has a part without rows", "Name another: train=PART,val=PART behind its name.")
    names = getattr(feature, "names", None)
    if names is not None:
        classes = tuple(map(str, names))
        bad = next((row for row, value in enumerate(values) if value is None or not 0 <= value < len(classes)), None)
        numbers = [] if bad is not None else values
    else:
        texts = [None if value is None else str(value) for value in values]
        classes = known or tuple(sorted({text for text in texts if text is not None}))
        places = {text: place for place, text in enumerate(classes)}
        bad = next((row for row, text in enumerate(texts) if text not in places), None)
        numbers = [] if bad is not None else [places[str(text)] for text in texts]
    if bad is not None:
        raise UserError(
            f"{name}: row {bad} has the label {shown(str(values[bad]))}, which is no class to train on",
            "A part without labels is for neither training nor validation: name others, as val=PART.",
        )
    if known and classes != known:
        raise UserError(f"{name}: its parts have different classes", "Divide one of them: --val-fraction 0.1.")
    return np.array(numbers, np.int64), classes


def _sizes(source: Any) -> Ids:
    """Bytes of each picture, int64 [n], from the table's offsets, or of the file that it names."""
    from pyarrow import compute

    sizes: list[int] = []
    for batch in source.with_format("arrow").iter(_AT_ONCE):
        column = batch.column(0)
        lengths = compute.binary_length(compute.struct_field(column, "bytes")).to_pylist()
        files = compute.struct_field(column, "path").to_pylist()
        for length, file in zip(lengths, files, strict=True):
            sizes.append(os.stat(file).st_size if length is None and file else length or 0)  # noqa: PTH116
    return np.array(sizes, np.int64)


def _newest(source: Any) -> str:
    """Of the files that hold the table's rows."""
    files = [file["filename"] for file in source.cache_files]
    return str(max(files, key=lambda file: Path(file).stat().st_mtime_ns)) if files else ""


def _stored(source: Any, row: int) -> bytes:
    """A picture of the table, or the file that it names."""
    (held,) = source[row].values()
    if held is None:
        raise ValueError("the row has no picture")
    content: bytes | None = held["bytes"]
    return Path(held["path"]).read_bytes() if content is None else content
