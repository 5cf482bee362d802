"""`lockstep predict`: name what is on new pictures."""

import csv
import dataclasses
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO
from unicodedata import normalize

from rich.cells import cell_len

from lockstep.commands.shared.arguments import launched, parse
from lockstep.commands.shared.grid import cut
from lockstep.config import Execution
from lockstep.config.execution import NOT_EVALUATIONS
from lockstep.config.fields import Arg, Positive, check_fields, require
from lockstep.distributed.files import named, new_file, whole_file, write_error
from lockstep.distributed.output import for_people
from lockstep.errors import UserError, cell, shown

if TYPE_CHECKING:
    from lockstep.distributed.world import World
    from lockstep.inference.classifier import Answer

_NOT_PREDICTIONS = (*NOT_EVALUATIONS, "strategy", "data_dir")
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d|conin\$|conout\$)\s*(\.|$)", re.I)  # devices, to Windows
_LONGEST = 255  # bytes of a file's name


@dataclass(frozen=True)
class Predict:
    """What `lockstep predict` takes beside the run and the pictures."""

    weights: Literal["best", "final"] = "best"
    """Which of a run's saved weights."""
    top: Positive = 5
    """How many classes to name for each picture, the likeliest first."""
    format: Literal["table", "csv", "jsonl"] = "table"
    """A table to read, comma-separated values, or a JSON object a line."""
    file: Annotated[str, Arg(unset="print it")] = ""
    """Write to this file instead."""
    sort_into: Annotated[str, Arg(unset="no copies")] = ""
    """Copy each picture into a folder of its likeliest class below this one."""
    follow_links: bool = False
    """Follow links that lead out of the folders."""
    trust_code: bool = False
    """Import and call the code that the weights name, as --model package.module:factory did."""
    execution: Execution = field(default_factory=Execution, metadata={"hidden": _NOT_PREDICTIONS})

    def __post_init__(self) -> None:
        check_fields(self)


def main(args: list[str]) -> int:
    """Name what is on new pictures."""
    about = "Name what is on new pictures, by the weights of a run, a weights file, or an exported program."
    names, chosen = parse(Predict(), args, about)
    require(
        len(names) >= 2,
        "predict needs a run and pictures",
        "As `lockstep predict runs/flowers photo.jpg more-photos/`.",
    )
    from lockstep.inference.loading import require_usable, weights_file
    from lockstep.inference.pictures import find

    path = weights_file(names[0], chosen.weights)
    require_usable(path, chosen.trust_code)
    pictures = find(names[1:], chosen.follow_links)
    if chosen.file:
        new_file(chosen.file, "--file")
    target = named(chosen.sort_into)
    require(target.is_dir() or not target.exists(), f"--sort-into: {target} is no folder", "Name another one.")
    return launched(predict, str(path), pictures, chosen, execution=chosen.execution)


def predict(world: "World", path: str, pictures: tuple[str, ...], chosen: Predict) -> int:
    """Name the pictures on this process, as one of the world's; rank 0 writes. Returns 0."""
    from rich.console import Console
    from rich.progress import Progress

    from lockstep.inference.classifier import predictions
    from lockstep.inference.loading import load

    classifier = load(path, device=str(world.device), trust_code=chosen.trust_code)
    size = classifier.card.eval_batch_size
    folders = class_folders(classifier.card.classes) if chosen.sort_into else {}
    seen = world.rank == 0 and sys.stderr.isatty()  # standard output is the answer's
    each = size * world.size  # pictures that all ranks take at once
    with Progress(console=Console(stderr=True), disable=not seen, transient=True) as bar:
        task = bar.add_task("pictures", total=-(-len(pictures) // each) * each)
        workers = chosen.execution.workers if len(pictures) > size else 0
        answers = predictions(classifier, pictures, world, chosen.top, workers, lambda: bar.advance(task, each))
    world.barrier()  # where writing fails, the others are stopped, and not while they end their loaders
    if world.rank == 0:
        _write(answers, chosen, folders)
    return 0


def _write(answers: Sequence["Answer"], chosen: Predict, folders: dict[str, str]) -> None:
    write = {"table": _table, "csv": _csv, "jsonl": _jsonl}[chosen.format]
    if chosen.file:
        with whole_file(named(chosen.file)) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            write(answers, file)
    else:
        write(answers, sys.stdout)
    if chosen.sort_into:
        _sort(answers, named(chosen.sort_into), folders)
    if broken := [answer.path for answer in answers if answer.error]:
        raise UserError(
            f"{len(broken):,} of {len(answers):,} pictures could not be read, as {broken[0]}",
            "All others are answered. Replace or remove these; why stands beside each in the answers.",
        )


def _table(answers: Sequence["Answer"], file: TextIO) -> None:
    """Paths and classes; a terminal gets as many classes as fit beside the path, and long paths cut in their middle."""
    room = shutil.get_terminal_size().columns if file.isatty() else 1 << 20
    paths = [shown(answer.path) for answer in answers]
    longest = max(cell_len(shown(str(answer.prediction))) for answer in answers)
    width = min(max(map(cell_len, paths)), max(room // 2, room - 2 - longest))
    for path, answer in zip(paths, answers, strict=True):
        says, left = shown(answer.error or str(answer.prediction)), len(answer.prediction.classes)
        while not answer.error and cell_len(says) > room - 2 - width and left > 1:
            left, likely = left - 1, zip(answer.prediction.classes, answer.prediction.probabilities, strict=True)
            classes, probabilities = zip(*list(likely)[:left], strict=True)
            says = shown(str(dataclasses.replace(answer.prediction, classes=classes, probabilities=probabilities)))
        path = cut(path, width)
        print(for_people(f"{path}{' ' * (width - cell_len(path))}  {says}", file), file=file)


def _csv(answers: Sequence["Answer"], file: TextIO) -> None:
    """`path,class,probability,class_2,probability_2,...,error`; of several labels a picture `labels` after the path."""
    several = ["labels"] * any(answer.prediction.labels is not None for answer in answers)
    top = max(len(answer.prediction.classes) for answer in answers)
    ranks = ["", *(f"_{k}" for k in range(2, top + 1))][:top]
    writer = csv.writer(file)
    writer.writerow(
        ["path", *several, *(f"{what}{rank}" for rank in ranks for what in ("class", "probability")), "error"]
    )
    for answer in answers:
        pairs = zip(map(cell, answer.prediction.classes), answer.prediction.probabilities, strict=True)
        values = [value for pair in pairs for value in pair] or [""] * (2 * top)
        labels = [cell(";".join(answer.prediction.labels or ())) for _ in several]
        writer.writerow([cell(answer.path), *labels, *values, cell(answer.error)])


def _jsonl(answers: Sequence["Answer"], file: TextIO) -> None:
    """`{"path": ..., "classes": [...], "probabilities": [...]}`, or "path" and "error"; names to the last byte.

    Of several labels a picture also `"labels": [...]`.
    """
    for answer in answers:
        found = {"error": answer.error} if answer.error else dataclasses.asdict(answer.prediction)
        if found.get("labels", ()) is None:
            del found["labels"]
        line = json.dumps({"path": answer.path, **found}, ensure_ascii=False)
        print("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in line), file=file)


def class_folders(classes: Sequence[str]) -> dict[str, str]:
    """Class -> the name of its folder: the class, but what is more than a letter to a file system or a shell as %XX.

    `urllib.parse.unquote` gives the class again. Classes that differ in case or Unicode form alone are one folder to
    some file systems: of those all is escaped but a-z and digits. A class without a name has the folder %.
    Raises UserError for a name that is too long for a folder.
    """
    alike = Counter(map(_folded, set(classes)))
    found = {}
    for name in classes:
        harmful = r"[^a-z0-9]" if alike[_folded(name)] > 1 else r'[%/\\:*?"<>|]|^[ .~-]|[ .]\Z'
        folder = re.sub(f"^.|{harmful}" if _RESERVED.match(name) else harmful, _as_hex, name)
        found[name] = "".join(c if c.isprintable() else _as_hex(c) for c in folder) or "%"
        if (size := len(found[name].encode())) > _LONGEST:
            raise UserError(
                f"--sort-into: class {shown(name[:40])}... has {size} bytes as a folder's name, at most {_LONGEST} fit",
                "Leave --sort-into out: --format jsonl says the classes.",
            )
    return found


def _as_hex(text: str | re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in str(text[0]).encode("utf-8", "surrogatepass"))


def _folded(name: str) -> str:
    return normalize("NFC", normalize("NFC", name).casefold())


def _sort(answers: Sequence["Answer"], folder: Path, folders: dict[str, str]) -> None:
    """Copy each picture into `folder / its class`, under its own name, or one with a number where that is taken."""
    temporary = folder / f".{os.getpid()}.tmp"
    try:
        for answer in (answer for answer in answers if not answer.error):
            source, target = Path(answer.path), folder / folders[answer.prediction.classes[0]]
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, temporary)
            place, number = target / source.name, 2
            while os.path.lexists(place):
                place, number = target / f"{source.stem}-{number}{source.suffix}", number + 1
            temporary.rename(place)
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        with suppress(OSError):  # where there is no folder for it
            temporary.unlink()
    taken = {answer.prediction.classes[0] for answer in answers if not answer.error}
    if other := [f"{name} is {folders[name]}" for name in sorted(taken) if folders[name] != name]:
        print(
            f"note: folders of classes whose names no folder can have everywhere: {shown(', '.join(other))}",
            file=sys.stderr,
        )
