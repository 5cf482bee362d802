"""Pictures by a table of (path, label[, split]): `--dataset table:FILE.csv`."""

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.folder import FolderSet, joined
from lockstep.data.label_sets import numbered
from lockstep.data.named import parse
from lockstep.data.rows import COLUMNS, Row, read_rows, shown
from lockstep.errors import UserError
from lockstep.processes.files import named

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NAMED = 3


@dataclass(frozen=True, eq=False)
class TableSet(FolderSet):
    """The pictures that a table names, in the order of classes and paths: that of its rows doesn't matter."""

    table: str = ""

    @property
    def name(self) -> str:
        """The table's path."""
        return self.table


def load_table(
    dataset: str, data_dir: Path, size: int, seed: int, resized_crop: bool, follow_links: bool = False
) -> tuple[TableSet, TableSet | None]:
    """The rows to train and to validate on; None: the table says of none that it is to be validated on.

    With the option `separator` a picture's label names several classes, or none: table:FILE.csv:separator=;

    Relative paths start at the table's folder, and may leave it with `follow_links` alone. Where no row is for
    validation, those for the test take its place; else they are left for the end, and a note says so.

    Raises:
        UserError: for what is no such table, naming the line, and files that aren't there or lie elsewhere.
    """
    name, named = parse(dataset, (*COLUMNS, "separator"))
    file = _found(name, data_dir)
    rows = read_rows(file, named)
    parts: dict[str, list[Row]] = {"train": [], "val": [], "test": []}
    has_split = any(row.split for row in rows)
    for row in rows:
        if has_split and row.split.lower() not in SPLITS:
            raise UserError(
                f"the table {file}, {row.line}: the split is {shown(row.split)!r}", "It is train, val or test."
            )
        parts[SPLITS[row.split.lower()] if has_split else "train"].append(row)
    notes: tuple[str, ...] = ()
    if parts["val"] and parts["test"]:
        notes = (f"note: {len(parts['test']):,} test images of {file} are left for the end",)
    held = parts["val"] or parts["test"]
    separator = named.get("separator", "")
    classes = _classes(file, parts["train"] or held, held, separator)
    used = [*parts["train"], *held]
    paths = _paths(file, used, follow_links)
    number = {label: k for k, label in enumerate(classes)}
    if not separator:
        of_row, sets = np.array([number[row.label] for row in used], np.int64), None
    else:
        of_row, sets = numbered([[number[label] for label in row.labels(separator)] for row in used], len(classes))
    label_of = {row.line: label for row, label in zip(used, of_row, strict=True)}

    def made(rows: list[Row], crops: bool, notes: tuple[str, ...]) -> TableSet:
        entries = sorted((label_of[row.line], paths[row.line]) for row in rows)
        found, ends = joined([os.fsencode(path) for _, path in entries])
        labels = np.array([label for label, _ in entries], np.int64)
        return TableSet(
            file.parent, classes, size, seed, crops, found, ends, labels, notes=notes, table=str(file),
            label_sets=sets,
        )  # fmt: skip

    if not parts["train"]:
        return made(held, resized_crop, notes), None
    return made(parts["train"], resized_crop, notes), made(held, False, ()) if held else None


def _classes(file: Path, trained: list[Row], held: list[Row], separator: str) -> tuple[str, ...]:
    """The classes to train on, by name; raises UserError for one that is only validated on."""
    classes = tuple(sorted({label for row in trained for label in row.labels(separator)}))
    if not classes:
        raise UserError(f"the table {file} has no label in any row", "Write the classes into its column of labels.")
    for row in held:
        for label in row.labels(separator):
            if label not in classes:
                raise UserError(
                    f"the table {file}, {row.line}: the class {shown(label)} is not among those to train on",
                    "Give it rows to train on, or leave it out.",
                )
    return classes


def _found(name: str, data_dir: Path) -> Path:
    """The table's file: by its path from here, else from the data folder."""
    here = named(name)
    found = next((path for path in (here, data_dir / here) if path.is_file()), None)
    if found is None:
        raise UserError(
            f"there is no table {here.absolute()}" + (f" or {data_dir / here}" if data_dir / here != here else ""),
            "Name its file: --dataset table:FILE.csv.",
        )
    return found.absolute()


def _paths(file: Path, rows: Iterable[Row], follow_links: bool) -> dict[str, str]:
    """By line each row's path from the table's folder, or the whole one of a file elsewhere."""
    root, real = str(file.parent), os.path.realpath(file.parent)
    folders: dict[str, str] = {}  # real paths: files share theirs
    lines: dict[str, str] = {}  # path -> the line where it stands
    missing: list[str] = []
    for row in rows:
        path = os.path.normpath(file.parent / row.path)
        key = os.path.relpath(path, root) if path.startswith(f"{root}{os.sep}") else path
        if key in lines:
            raise UserError(
                f"the table {file} names {shown(key)} twice: {lines[key]} and {row.line}",
                "Leave one of the two out; a picture has one label here.",
            )
        lines[key] = row.line
        folder = path.rpartition(os.sep)[0]
        folders[folder] = folders.get(folder) or os.path.realpath(folder)
        place = _place(path, folders[folder])
        if place is None:
            missing.append(f"{row.line}: {shown(row.path)}")
        elif not follow_links and not Path(place).is_relative_to(real):
            raise UserError(
                f"the table {file}, {row.line}: {shown(row.path)} lies outside of {root}",
                "Give --follow-links if that is meant, or put table and pictures into one folder.",
            )
    if missing:
        more = f", and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
        slashes = any("\\" in line for line in missing[:_NAMED])
        raise UserError(
            f"the table {file} names {len(missing):,} file(s) that are not there: {', '.join(missing[:_NAMED])}{more}",
            f"{'Write paths with /, not with a backslash. ' if slashes else ''}Relative paths start at {root}.",
        )
    return {line: key for key, line in lines.items()}


def _place(path: str, folder: str) -> str | None:
    """The real path of the folder that holds a file's bytes, `folder` but for links; None where there is no file."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return os.path.realpath(path) if Path(path).is_file() else None
        return folder if stat.S_ISREG(mode) else None
    except (OSError, ValueError):  # also a name that is too long, or a file where a folder should be
        return None
