"""`lockstep predict`: name what is on new pictures."""

import csv
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from tyro.conf import arg

from lockstep.commands.shared.arguments import launched, parse
from lockstep.commands.shared.helping import asked
from lockstep.config import Execution
from lockstep.config.fields import require, require_at_least
from lockstep.config.flags import split_arguments
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write, write_error

if TYPE_CHECKING:
    from lockstep.inference.predictions import Answer
    from lockstep.processes.world import World

# not what writes a run, and not the size of a chunk: other shapes would round otherwise than evaluation does
_NOT_PREDICTIONS = (
    "out",
    "cache",
    "log",
    "log_every",
    "eval_every",
    "eval_batch_size",
    "model_parallel",
    "duplicates",
    "strategy",
    "data_dir",
)


@dataclass(frozen=True)
class Predict:
    """What `lockstep predict` takes beside the run and the pictures."""

    weights: Literal["best", "final"] = "best"
    """Which of a run's saved weights."""
    top: int = 5
    """How many classes to name for each picture, the likeliest first."""
    format: Literal["table", "csv", "jsonl"] = "table"
    """A table to read, comma-separated values, or a JSON object a line."""
    file: Annotated[str, arg(help_behavior_hint="(default: print it)")] = ""
    """Write to this file instead."""
    sort_into: Annotated[str, arg(help_behavior_hint="(default: no copies)")] = ""
    """Copy each picture into a folder of its likeliest class below this one."""
    follow_links: bool = False
    """Follow links that lead out of the folders."""
    trust_code: bool = False
    """Import and call the code that the weights name, as --model package.module:factory did."""
    execution: Execution = field(default_factory=Execution, metadata={"hidden": _NOT_PREDICTIONS})

    def __post_init__(self) -> None:
        require_at_least(1, self, "top")


def main(args: list[str]) -> int:
    """Name what is on new pictures."""
    names, rest = split_arguments(args, Predict)
    if asked(rest) is None:
        require(
            len(names) >= 2,
            "predict needs a run and pictures",
            "As `lockstep predict runs/flowers photo.jpg more-photos/`.",
        )
    chosen: Predict = parse(
        Predict, Predict(), rest, "lockstep predict RUN PICTURE|FOLDER...", "Name what is on new pictures."
    )
    from lockstep.inference.loading import require_usable, weights_file
    from lockstep.inference.pictures import find

    path = weights_file(names[0], chosen.weights)
    require_usable(path, chosen.trust_code)
    pictures = find(names[1:], chosen.follow_links)
    if chosen.file and Path(chosen.file).exists():
        raise UserError(f"{chosen.file} exists already", "Name another file with --file, or remove that one.")
    return launched(predict, str(path), pictures, chosen, execution=chosen.execution)


def predict(world: "World", path: str, pictures: tuple[str, ...], chosen: Predict) -> int:
    """Name the pictures on this process, as one of the world's; rank 0 writes. Returns 0."""
    from lockstep.inference.loading import load
    from lockstep.inference.predictions import predictions

    classifier = load(path, device=str(world.device), trust_code=chosen.trust_code)
    size = classifier.card.eval_batch_size
    chunks = -(-len(pictures) // size)
    with _progress(-(-chunks // world.size) * size * world.size, world.rank == 0) as advance:
        answers = predictions(
            classifier,
            pictures,
            world,
            chosen.top,
            chosen.execution.workers if len(pictures) > size else 0,
            lambda: advance(size * world.size),
        )
    if world.rank == 0:
        _write(answers, chosen)
    return 0


@contextmanager
def _progress(total: int, here: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error where that is a terminal: standard output is the answer's."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not (here and sys.stderr.isatty()), transient=True) as bar:
        task = bar.add_task("pictures", total=total)
        yield lambda count: bar.advance(task, count)


def _write(answers: Sequence["Answer"], chosen: Predict) -> None:
    write = {"table": _table, "csv": _csv, "jsonl": _jsonl}[chosen.format]
    if chosen.file:
        path = Path(chosen.file)
        try:
            with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
                write(answers, file)
        except OSError as error:
            raise write_error(path, error) from error
    else:
        write(answers, sys.stdout)
    if chosen.sort_into:
        _sort(answers, Path(chosen.sort_into))
    if broken := sum(answer.error != "" for answer in answers):
        print(f"lockstep: {broken} of {len(answers):,} pictures could not be read", file=sys.stderr)


def _table(answers: Sequence["Answer"], file: TextIO) -> None:
    width = max(len(answer.path) for answer in answers)
    for answer in answers:
        print(f"{answer.path:<{width}}  {answer.error or answer.prediction}", file=file)


def _csv(answers: Sequence["Answer"], file: TextIO) -> None:
    """`path,class,probability,class_2,probability_2,...,error`."""
    top = max(len(answer.prediction.classes) for answer in answers)
    ranks = ["", *(f"_{k}" for k in range(2, top + 1))][:top]
    writer = csv.writer(file)
    writer.writerow(["path", *(f"{what}{rank}" for rank in ranks for what in ("class", "probability")), "error"])
    for answer in answers:
        pairs = zip(answer.prediction.classes, answer.prediction.probabilities, strict=True)
        values = [value for pair in pairs for value in pair] or [""] * (2 * top)
        writer.writerow([answer.path, *values, answer.error])


def _jsonl(answers: Sequence["Answer"], file: TextIO) -> None:
    """`{"path": ..., "classes": [...], "probabilities": [...]}`, or "path" and "error"."""
    for answer in answers:
        found = {"error": answer.error} if answer.error else dataclasses.asdict(answer.prediction)
        print(json.dumps({"path": answer.path, **found}, ensure_ascii=False), file=file)


def _sort(answers: Sequence["Answer"], folder: Path) -> None:
    """Copy each picture into `folder / its class`, under its own name, or one with a number where that is taken."""
    for answer in answers:
        if answer.error:
            continue
        source, target = Path(answer.path), folder / answer.prediction.classes[0]
        try:
            target.mkdir(parents=True, exist_ok=True)
            place, number = target / source.name, 2
            while place.exists():
                place, number = target / f"{source.stem}-{number}{source.suffix}", number + 1
            shutil.copy2(source, place)
        except OSError as error:
            raise write_error(target, error) from error
