"""The report: what is known of runs as plain values, and the HTML page that shows it by templates/report.html."""

import base64
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

import lockstep
from lockstep.commands.diff import count_devices, read_config
from lockstep.commands.report.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, charts
from lockstep.commands.report.history import History, Start
from lockstep.commands.shared.arguments import train_arguments
from lockstep.config import Config, fields
from lockstep.distributed.files import finite
from lockstep.errors import UserError, shown
from lockstep.inference.mistakes import Mistake, Mistakes
from lockstep.monitoring.journal import JOURNAL, Reader
from lockstep.monitoring.progress import duration
from lockstep.monitoring.runs import integer, mapping, number, text

MOST_RUNS = 12  # more lines in a chart can't be told apart
_STRETCHES = 400  # of the curves of all runs: each has two points
_NUMBERED = 26  # classes up to which the confusion matrix is shown
_PAIRS, _VALUE = 10, 200  # pairs of classes, and characters of a config's value, that are shown
_SMALL = 64  # pixels of width up to which a picture is enlarged without smoothing


@dataclass
class Run:
    """A run of a report: its name there, where it is, and what is known of it."""

    name: str
    folder: str
    config: dict[str, Any]  # as config.json has it, or the journal
    history: History
    damage: str = ""  # of the journal
    mistakes: Mistakes = field(default_factory=lambda: Mistakes("they were not asked for (--no-pictures)"))


def load_runs(folders: Sequence[str]) -> list[Run]:
    """The runs in these folders. Raises UserError where one holds no journal, or where there are too many."""
    if len(folders) > MOST_RUNS:
        raise UserError(f"report of {len(folders)} runs", f"A page takes {MOST_RUNS} at most: name those to compare.")
    return [
        _load(name, folder, _STRETCHES // len(folders)) for name, folder in zip(_names(folders), folders, strict=True)
    ]


def _names(folders: Sequence[str]) -> list[str]:
    """The last part of each path, with as many of those before it as tell them apart."""
    parts = [Path(folder).absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(each)} ({place})" for place, each in enumerate(parts, 1)]  # a folder that was named twice


def _load(name: str, folder: str, stretches: int) -> Run:
    path = Path(folder) / JOURNAL
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no {JOURNAL}", "Name one that `lockstep train` made.")
    reader = Reader(path)
    history = History(Path(folder), reader, stretches)
    try:
        config = read_config(Path(folder))
    except UserError:  # damaged: the journal has it too
        config = {}
    return Run(name, folder, config or history.run.config, history, reader.damage)


def command_of(config: Mapping[str, Any], folder: str) -> tuple[str, str]:
    """The command that trains so, and what to know of it; empty where this version can't read the config.

    A recipe that is code is not called to find which flags it sets: the command takes the folder's config whole.
    """
    try:
        whole = Config.from_dict(dict(config))
        if ":" in whole.recipe:
            words = ["train", "--config", f"{folder}/config.json", "--trust-code"]
            return shlex.join(["lockstep", *words]), f"The recipe {whole.recipe} is code: read it first."
        words = train_arguments(whole.with_execution(out=""))
    except UserError as error:
        return "", f"This version can't make a command of the run's config: {error.message}"
    data = whole.execution.data_dir
    return shlex.join(["lockstep", *words]), f"It reads its data from {data}." if data else ""


def as_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All of the report but the pictures and drawings, as values that JSON has."""
    return dict(
        finite(
            {
                "lockstep": lockstep.__version__,
                "differences": _differences(runs),
                "equal": _equal(runs),
                "runs": [_run_data(run) for run in runs],
            }
        )
    )


def _differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Entries of the configs that are not the same in all runs: their place, and each run's value."""
    first, *others = (run.config for run in runs)
    found: dict[str, list[str]] = {}
    for place, config in enumerate(others, 1):
        for path, here, there in fields.differences(first, config):
            found.setdefault(path, [here] * len(runs))[place] = there
    return [{"entry": path, "values": values} for path, values in found.items() if path != "execution.out"]


def _equal(runs: Sequence[Run]) -> list[str]:
    """Which runs saw the same samples, and which ended with the same weights."""
    lines = []
    for name, what in (
        ("ledger_sha256", "the same samples in the same order"),
        ("weights_sha256", "equal weights, bit by bit"),
    ):
        alike: dict[str, list[str]] = defaultdict(list)
        for run in runs:
            if digest := text(run.history.run.of("end"), name):
                alike[digest].append(run.name)
        found = [f"{' and '.join(names)}: {what}." for names in alike.values() if len(names) > 1]
        lines += found or ([f"No two of the runs have {what}."] if alike and len(runs) > 1 else [])
    return lines


def _run_data(run: Run) -> dict[str, Any]:
    history, summary = run.history, run.history.run
    command, note = command_of(run.config, run.folder)
    end, newest = summary.of("end"), summary.of("run")
    ended = summary.last.get("kind") == "end"
    tops = history.points("eval top1")
    speeds = sorted(speed for _, _, speed in history.points("train images_per_s"))
    config = run.config
    return {
        "name": run.name,
        "folder": run.folder,
        "state": text(summary.last, "status") or "ended" if ended else "no end recorded: it still runs, or was killed",
        "model": text(mapping(config, "model"), "model"),
        "dataset": text(mapping(config, "data"), "dataset"),
        "step": summary.step or 0,
        "steps_per_epoch": history.steps_per_epoch,
        "epochs": integer(config, "epochs"),
        "top1": number(summary.of("eval"), "top1"),
        "loss": number(summary.of("eval"), "loss"),
        "best": max(tops, key=lambda point: point[2], default=None),
        "processes": history.processes,
        "images_per_s": speeds[len(speeds) // 2] if speeds else None,
        "work_s": history.work,
        "pause_s": history.spent["between starts"],
        "trained_again": history.trained_again,
        "start_count": history.starts.count,
        "starts": [_start_data(start) for start in history.starts],
        "event_count": history.events.count,
        "events": [{"seconds": seconds, "sentence": sentence} for seconds, sentence in history.events],
        "curves": {name: curve.points for name, curve in history.curves.items()},
        "spent": history.spent,
        "classes": _class_data(summary.of("classes")),
        "law": {name: value for name, value in summary.of("law").items() if name not in ("kind", "time")},
        "exact": integer(config, "exact"),
        "seed": integer(config, "seed"),
        "digests": {
            "ledger": text(end, "ledger_sha256"),
            "weights": text(end, "weights_sha256"),
            "training data": text(mapping(newest, "data"), "fingerprint"),
        },
        "notes": _texts(newest, "notes")[:50],
        "damage": run.damage,
        "config": config,
        "command": command,
        "command_note": note,
        "mistakes": asdict(run.mistakes) | {"shown": [_mistake_data(mistake) for mistake in run.mistakes.shown]},
    }


def _start_data(start: Start) -> dict[str, Any]:
    versions = [f"{name} {version}" for name, version in mapping(start.run, "versions").items()]
    return {
        "processes": start.processes,
        "resumed_from": integer(start.run, "resumed_from") or 0,
        "seconds": start.seconds,
        "pause": start.pause,
        "ended": start.ended,
        "backend": text(mapping(start.run, "world"), "backend"),
        "threads": integer(start.run, "threads"),
        "devices": count_devices(start.run),
        "versions": ", ".join(versions),
        "parameters": integer(start.run, "parameters"),
    }


def _mistake_data(mistake: Mistake) -> dict[str, Any]:
    values = asdict(mistake)
    del values["picture"]
    return values


def _class_data(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scores of a `classes` record, the lowest F1 first; None where its lists don't fit each other."""
    names = _texts(record, "classes")
    images, predicted, correct = (_counts(record.get(name)) for name in ("images", "predicted", "correct"))
    if not names or not len(names) == len(images) == len(predicted) == len(correct):
        return None
    rows = [
        {"name": name, "images": n, "precision": _ratio(c, p), "recall": _ratio(c, n), "f1": _ratio(2 * c, n + p)}
        for name, n, p, c in zip(names, images, predicted, correct, strict=True)
    ]
    rows_of = record.get("confusion")
    matrix = [_counts(row) for row in rows_of] if isinstance(rows_of, list) else []
    if len(matrix) != len(names) or any(len(row) != len(names) for row in matrix):
        matrix = []
    wrong = [(n, row, k) for row, counts in enumerate(matrix) for k, n in enumerate(counts) if n and row != k]
    wrong.sort(key=lambda each: -each[0])
    return {
        "step": integer(record, "step"),
        "rows": sorted(rows, key=lambda row: (row["images"] == 0, row["f1"])),
        "names": names,
        "confusion": matrix,
        "pairs": [(names[row], names[k], n) for n, row, k in wrong[:_PAIRS]],
    }


def _texts(record: Mapping[str, Any], name: str) -> list[str]:
    """The texts of a list in a record."""
    value = record.get(name)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _counts(value: Any) -> list[int]:
    """A list of whole numbers that are not negative; empty for anything else."""
    found = [integer({"": item}, "") for item in value] if isinstance(value, list) else []
    return [item for item in found if item is not None] if None not in found else []


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def html(runs: Sequence[Run], data: Mapping[str, Any]) -> str:
    """The page of these runs and their `as_data`. All that they hold is escaped as it is put in."""
    data = _visible(data)
    return _template().render(
        data=data,
        runs=data["runs"],
        several=len(runs) > 1,
        charts=charts([(each["name"], run.history) for each, run in zip(data["runs"], runs, strict=True)]),
        box={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        pictures=[[_picture(mistake) for mistake in run.mistakes.shown] for run in runs],
        numbered=_NUMBERED,
        longest_value=_VALUE,
    )


@cache
def _template() -> Template:
    templates = Environment(
        loader=PackageLoader("lockstep.commands.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    templates.filters |= {
        "duration": lambda seconds: duration(seconds).replace(" ", "\N{NO-BREAK SPACE}"),
        "percent": lambda value, decimals=1: f"{value:.{decimals}%}",
        "ratio": _ratio,
    }
    return templates.get_template("report.html")


def _visible(value: Any) -> Any:
    """Plain values whose texts hold no control characters, nor halves of letters that UTF-8 can't write."""
    if isinstance(value, dict):
        return {_visible(key): _visible(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_visible(item) for item in value]
    return shown(value, keep="\n") if isinstance(value, str) else value


def _picture(mistake: Mistake) -> dict[str, Any]:
    kind = "png" if mistake.picture.startswith(b"\x89PNG") else "jpeg"
    encoded = base64.b64encode(mistake.picture).decode()
    return {"address": f"data:image/{kind};base64,{encoded}", "small": mistake.width <= _SMALL}
