"""`lockstep watch`: follow a run from another terminal, or another machine that sees its folder. Imports no torch."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.commands.shared.arguments import one_name, parse
from lockstep.config.fields import require
from lockstep.distributed.files import writer
from lockstep.errors import EXIT_FAILURE, UserError, shown
from lockstep.monitoring.journal import JOURNAL, Reader
from lockstep.monitoring.progress import ProgressBar, clock, duration
from lockstep.monitoring.runs import ENDS, RunSummary, integer, mapping, number, run_folders, summarize, text

_RESTART_S = 60.0  # that a run on another machine, whose lock stays, may take to start again after a failure
_KILLED = "killed: its process is gone and left no end; the same command with --out goes on from its checkpoint"
_SILENT = "silent: its last line is old, and whether its process on another machine lives can't be known from here"


@dataclass(frozen=True)
class Watching:
    """How to follow."""

    every: float = 1.0
    """Seconds between two looks at the journal."""
    once: bool = False
    """Print what there is, and end."""

    def __post_init__(self) -> None:
        require(0.05 <= self.every <= 3600, f"--every {self.every:g} is not 0.05 to 3600", "Give seconds, as 1.")


def main(args: list[str]) -> int:
    """Follow a run until it ends."""
    about = (
        "Follow a run by its journal, until it ends; without RUN the newest one below runs/. Exit code 0: it came "
        "to its end; 1: it stopped, failed or was killed before."
    )
    names, chosen = parse(Watching(), args, about)
    folder = Path(one_name("watch", "run folder", names) or _newest())
    if not (folder / JOURNAL).is_file() and writer(folder) not in ("here", "elsewhere"):
        raise UserError(f"{folder} holds no run", "Name a run folder; `lockstep runs` lists them.")
    bar = ProgressBar(0, 1, enabled=True)
    with closing(bar):
        bar.write(f"run folder {folder}")
        return _follow(folder, chosen, bar)


def _newest() -> Path:
    """The run below runs/ that began last, those that run before the others."""
    now = time.time()
    found = [run for folder in run_folders(Path("runs")) if (run := summarize(folder, now)) is not None]
    if not found:
        raise UserError("watch needs a run folder: there is none below runs/", "As `lockstep watch runs/mine`.")
    return max(found, key=lambda run: (run.state == "running", number(run.of("run"), "time") or 0.0)).folder


def _follow(folder: Path, chosen: Watching, bar: ProgressBar) -> int:
    reader, run = Reader(folder / JOURNAL), RunSummary(folder)
    failed_at, warned = None, False
    while True:
        who = writer(folder)
        gone = who in ("none", "killed")  # before the last look: what it wrote last is then there to read
        news = _take_news(reader, run, bar)
        ended = run.last.get("kind") == "end"
        if ended and run.last.get("status") == "completed":
            return 0
        if (progress := progress_of(run)) is not None and not ended:
            bar.show(*progress)
        if who == "elsewhere" and not warned and not news and _is_silent(folder):
            bar.write(_SILENT)
            warned = True
        failed_at = (failed_at or time.monotonic()) if ended else None
        waited = failed_at is not None and time.monotonic() - failed_at > _RESTART_S
        if gone or waited or chosen.once:
            if not ended and gone:
                bar.write(_KILLED)
            return EXIT_FAILURE if ended or gone else 0
        time.sleep(chosen.every)


def _is_silent(folder: Path) -> bool:
    run = summarize(folder, time.time())
    return run is not None and run.state == "silent"


def _take_news(reader: Reader, run: RunSummary, bar: ProgressBar) -> bool:
    """Note and print the new records; False where there are none, as before the first, or while none can be read."""
    news = False
    try:
        for record in reader if reader.path.is_file() else ():
            news = True
            if sentence := describe(record, run):
                bar.write(f"{clock_time(number(record, 'time')) or '--:--:--'} {sentence}")
            run.add(record)
    except UserError:  # a network's folder may be away for a moment
        pass
    return news


def progress_of(run: RunSummary) -> tuple[str, float | None, list[str]] | None:
    """For the bar: what goes on, the fraction of the run that is done, and its numbers; None before the first step."""
    start, newest = run.of("run"), run.of("step")
    step, epoch, per_epoch = integer(newest, "step"), integer(newest, "epoch"), integer(start, "steps_per_epoch")
    if step is None or epoch is None:
        return None
    total, parts = run.epochs * per_epoch if run.epochs and per_epoch else None, []
    if (speed := number(newest, "images_per_s")) is not None:
        parts.append(f"{speed:,.0f} images/s")
    began, now, first = number(start, "time"), number(newest, "time"), integer(start, "resumed_from") or 0
    if total and began is not None and now is not None and step > first and now > began:
        parts.append(f"{clock((now - began) / (step - first) * max(0, total - step))} left")
    for name, form in (("loss", ".4f"), ("lr", ".3g")):
        if (value := number(newest, name)) is not None:
            parts.append(f"{name} {value:{form}}")
    wait, batch = number(newest, "data_wait_ms"), integer(run.config, "batch_size")
    if wait is not None and speed is not None and batch:
        parts.append(f"data wait {min(1.0, wait / 1000 * speed / batch):.0%}")
    parts.append(f"step {step}/{total}" if total else f"step {step}")
    done = max(0.0, min(1.0, step / total)) if total else None
    return f"epoch {epoch + 1}/{'?' if run.epochs is None else run.epochs}", done, parts


def describe(record: Mapping[str, Any], run: RunSummary) -> str:
    """A sentence on a record that comes after those of `run`; empty for what only numbers say, as `step` records."""
    sentences = {
        "run": _start, "eval": _evaluation, "fault": _fault, "stop": _stop,
        "law": _law, "resize": _resize, "end": _end,
    }  # fmt: skip
    about = sentences[record["kind"]](record, run) if record["kind"] in sentences else ""
    return shown(about.strip().partition("\n")[0])


def clock_time(seconds: float | None, form: str = "%H:%M:%S") -> str:
    """A time in seconds since 1970 by the local clock; empty for one that no clock shows."""
    try:
        return "" if seconds is None else time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _count(record: Mapping[str, Any], name: str) -> str:
    value = integer(record, name)
    return "?" if value is None else f"{value}"


def _start(record: Mapping[str, Any], run: RunSummary) -> str:
    if "resized_from" in record:  # a `resize` record follows
        return ""
    place, resumed = f"{_count(mapping(record, 'world'), 'size')} process(es)", integer(record, "resumed_from") or 0
    if run.starts or resumed:
        silent = run.starts and run.last.get("kind") != "end" and text(run.last, "fault") != "restart"
        lost = run.starts and (run.step or 0) > resumed
        again = f"; steps {resumed + 1} to {run.step} are trained again" if lost else ""
        return f"{'was killed, and ' if silent else ''}goes on from step {resumed} on {place}{again}"
    config, day = mapping(record, "config"), clock_time(number(record, "time"), "%Y-%m-%d")
    model, dataset = text(mapping(config, "model"), "model"), text(mapping(config, "data"), "dataset")
    about = f"{text(config, 'recipe')}: {model} on {dataset}, batch {_count(config, 'batch_size')}, {place}"
    return f"{about}, began {day}" if day else about


def _evaluation(record: Mapping[str, Any], run: RunSummary) -> str:
    epoch = integer(record, "epoch")
    top5 = number(record, "top5")  # of five classes or fewer it is always right, and says nothing
    tops = [("top-1 {:.2%}", number(record, "top1")), ("top-5 {:.2%}", None if top5 == 1 else top5)]
    scores = [*tops, ("loss {:.4f}", number(record, "loss")), ("({:,} images)", integer(record, "count"))]
    parts = [form.format(value) for form, value in scores if value is not None]
    return f"epoch {'?' if epoch is None else epoch + 1}/{run.epochs or '?'}: {'  '.join(parts)}"


def _fault(record: Mapping[str, Any], _: RunSummary) -> str:
    ranks, why = record.get("ranks"), text(record, "cause") or text(record, "error")
    who = f", rank(s) {', '.join(map(str, ranks))}" if isinstance(ranks, list) and ranks else ""
    back = f"; back to step {_count(record, 'back_to')}" if "back_to" in record else ""
    return f"{text(record, 'fault')} at step {_count(record, 'step')}{who}{f': {why}' if why else ''}{back}"


def _stop(record: Mapping[str, Any], _: RunSummary) -> str:
    best = number(record, "best")
    score = "" if best is None else f"; the best {text(record, 'metric')} was {best:.4g}"
    return f"ends before its last epoch: --{text(record, 'reason')}{score}"


def _law(record: Mapping[str, Any], _: RunSummary) -> str:
    return text(record, "message")


def _resize(record: Mapping[str, Any], _: RunSummary) -> str:
    before, now, seconds = _count(record, "before"), _count(record, "processes"), number(record, "seconds")
    return f"{before} -> {now} processes at step {_count(record, 'step')}" + (f", {seconds:.1f} s" if seconds else "")


def _end(record: Mapping[str, Any], _: RunSummary) -> str:
    status, seconds, top1 = text(record, "status"), number(record, "seconds"), number(record, "top1")
    word: str = ENDS.get(status, status or "ended")
    return ", ".join(
        [
            word if seconds is None or seconds < 0 else f"{word} after {duration(seconds)}",
            f"step {_count(record, 'steps')}",
            *([] if top1 is None else [f"top-1 {top1:.2%}"]),
            *filter(None, [text(record, "error")]),
        ]
    )
