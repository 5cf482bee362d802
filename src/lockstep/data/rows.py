"""The rows of a table of pictures, as its file has them: CSV, TSV (or with semicolons), and parquet."""

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError, reason, refusal

_PATH = ("path", "file", "image", "filename", "file_name", "filepath", "image_path")
COLUMNS = {"path": _PATH, "label": ("label", "class", "target", "class_name"), "split": ("split",)}
_SEPARATORS = "\t;,"
_UTF8 = "Save it as UTF-8 (in a spreadsheet: 'CSV UTF-8'; by hand: `iconv -f latin1 -t utf8`)."


@dataclass(frozen=True)
class Row:
    """A picture of a table; `line`: where it stands, for messages."""

    line: str
    path: str
    label: str
    split: str

    def labels(self, separator: str) -> list[str]:
        """The label, or with a separator those that stand in its field; none of an empty one."""
        if not separator:
            return [self.label]
        return [part.strip() for part in self.label.split(separator) if part.strip()]


def read_rows(file: Path, named: dict[str, str]) -> list[Row]:
    """The rows of a table in their order. `named`: columns by what they are for, where the user has said so.

    Raises:
        UserError: for a file that is no table, columns that aren't there or could be several, and empty entries; it
            names the line.
    """
    try:
        lines = _parquet(file, named) if file.suffix.lower() in (".parquet", ".pq") else _text(file)
        header, rest = next(lines), lines
        places = _columns(file, header[1], named)
        bare = "separator" in named  # a picture may be of no class
        rows = [_row(file, line, values, header[1], places, bare) for line, values in rest]
    except StopIteration:
        rows = []
    except OSError as error:
        raise UserError(
            f"the table {file} can't be read: {refusal(error)}",
            "Name a file: --dataset table:FILE.csv.",
        ) from error
    if not rows:
        raise UserError(f"the table {file} has no rows", "Its first line names the columns, each other one a picture.")
    return rows


def shown(text: str) -> str:
    """Of a table's text what fits into a message, on one line."""
    short = text if len(text) <= 80 else f"{text[:77]}..."
    return short if short.isprintable() else repr(short)


def _text(file: Path) -> Iterator[tuple[str, list[str]]]:
    raw = file.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"the table {file} is not UTF-8: line {line} has the byte {raw[error.start]:#x}", _UTF8
        ) from error
    first = text.split("\n", 1)[0]
    separator = max(_SEPARATORS, key=first.count)  # of several the last: a comma, where there is none of them
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    while True:
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(
                f"the table {file} is damaged at line {reader.line_num}: {shown(str(error))}",
                'A field with a comma, a quote or a line break stands in "quotes", and a quote in it twice.',
            ) from error
        if values:  # else an empty line
            yield f"line {reader.line_num}", values


def _parquet(file: Path, named: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"the table {file} needs pyarrow", "pip install 'lockstep-torch[table]', or write a CSV."
        ) from error
    try:
        names = parquet.read_schema(file).names
        places = _columns(file, names, named)
        columns = {what: names[place] for what, place in places.items()}
        table = parquet.read_table(file, columns=list(columns.values()))
    except pyarrow.ArrowException as error:
        raise UserError(f"the table {file} can't be read: {reason(error)}", "Write it again, or as a CSV.") from error
    yield "the columns", [*columns.values()]
    values = [table.column(name).to_pylist() for name in columns.values()]
    for number, row in enumerate(zip(*values, strict=True), 1):
        for name, value in zip(columns.values(), row, strict=True):
            if not isinstance(value, str | int | None):
                raise UserError(
                    f"the table {file}: the column {shown(name)} holds {type(value).__name__}, not text or numbers",
                    "Pictures themselves in a parquet file are read by --dataset hf:FOLDER.",
                )
        yield f"row {number}", ["" if value is None else str(value) for value in row]


def _columns(file: Path, header: Iterable[str], named: dict[str, str]) -> dict[str, int]:
    """What a column is for -> its place, by the usual names or those that the user gives."""
    names = [name.strip() for name in header]
    found: dict[str, int] = {}
    for what, usual in COLUMNS.items():
        wanted = [named[what]] if what in named else usual
        places = [i for i, name in enumerate(names) if name in wanted or (what not in named and name.lower() in usual)]
        if len(places) > 1:
            which = " and ".join(shown(names[place]) for place in places[:4])
            raise UserError(
                f"the table {file}: the columns {which} could each be the {what}",
                f"Say which: --dataset table:{file}:{what}=COLUMN, each name once.",
            )
        if not places and (what != "split" or what in named):
            have = ", ".join(map(shown, names[:8])) + (", ..." if len(names) > 8 else "")
            called = f"no column {shown(named[what])}" if what in named else f"no column for the {what}"
            raise UserError(
                f"the table {file} has {called}: its first line is {have}",
                f"Call one {usual[0]}, or say which by --dataset table:{file}:{what}=COLUMN.",
            )
        if places:
            found[what] = places[0]
    return found


def _row(file: Path, line: str, values: list[str], header: list[str], places: dict[str, int], may_be_bare: bool) -> Row:
    def refuse(what: str, remedy: str) -> UserError:
        return UserError(f"the table {file}, {line}: {what}", remedy)

    if len(values) != len(header):
        raise refuse(
            f"{len(values)} field(s), and the first line has {len(header)}",
            'A field with a comma or a line break stands in "quotes".',
        )
    given = {what: values[place].strip() for what, place in places.items()}
    for what in ("path",) if may_be_bare else ("path", "label"):
        if not given[what]:
            raise refuse(f"no {what}", f"Fill in the column {shown(header[places[what]])}, or leave the row out.")
    if "\0" in given["path"]:
        raise refuse(f"the path {shown(given['path'])} has a zero byte", "Write the table anew.")
    if not given["label"].isprintable():
        raise refuse(f"the label {shown(given['label'])} has a line break or the like", "Write it on one line.")
    return Row(line, given["path"], given["label"], given.get("split", ""))
