"""A journal followed as it grows, and its records as lines for people. torch is not imported."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.watch.outside import group, number, parsed, text, whole
from lockstep.watch.progress import clock, duration


class Follower:
    """The records that have come to a journal since the last look."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0  # where the first line begins that was not whole yet

    def news(self) -> list[dict[str, Any]]:
        """The new records; a line that is being written, or torn, is looked at again the next time.

        Raises OSError where the file can't be read.
        """
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self.offset:  # another file has taken its place
                self.offset = 0
            file.seek(self.offset)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self.offset += end
        return [record for line in content[:end].splitlines() if (record := parsed(line)) is not None]


@dataclass
class Story:
    """What is known of a run after the records so far."""

    config: dict[str, Any] = field(default_factory=dict)
    per_epoch: int | None = None  # steps
    start: tuple[int, float] | None = None  # step and time at which its processes were started last
    step: dict[str, Any] = field(default_factory=dict)  # the newest `step` record
    last: dict[str, Any] = field(default_factory=dict)  # the newest record

    def take(self, record: dict[str, Any]) -> list[str]:
        """Note a record; returns the lines that tell it. `step` records and checkpoints have none."""
        self.last = record
        when = number(record, "time")
        match record["kind"]:
            case "run":
                again = bool(self.config)
                self.config = group(record, "config")
                self.per_epoch = whole(record, "steps_per_epoch") or self.per_epoch
                self.start = None if when is None else (whole(record, "resumed_from") or 0, when)
                return _at(when, _started(record, self.config, again))
            case "step":
                self.step = record
            case "eval":
                epoch, step = whole(record, "epoch"), whole(record, "step")
                if epoch is not None and step and not self.per_epoch and epoch >= 0:
                    self.per_epoch = max(1, step // (epoch + 1))
                return _at(when, self._evaluated(record))
            case "stop":
                best = number(record, "best")
                kept = "" if best is None else f"; the best {text(record, 'metric')} was {best:.4g}"
                return _at(when, f"ends before its last epoch: --{text(record, 'reason')}{kept}")
            case "fit":
                return _at(when, f"--accumulate auto: {whole(record, 'accumulate')} micro-batches")
            case "fault":
                return _at(when, _fault(record))
            case "end":
                return _at(when, _ended(record))
        return []

    def line(self) -> tuple[str, float | None, list[str]] | None:
        """For the bar: what goes on, the share of the run that is done, and its numbers; None before the first step."""
        step, epoch = whole(self.step, "step"), whole(self.step, "epoch")
        if step is None or epoch is None:
            return None
        epochs, parts, total = whole(self.config, "epochs"), [], None
        if epochs and self.per_epoch:
            total = epochs * self.per_epoch
        if (speed := number(self.step, "images_per_s")) is not None:
            parts.append(f"{speed:,.0f} images/s")
        now = number(self.step, "time")
        if total and self.start and now is not None and step > self.start[0] and now > self.start[1]:
            parts.append(f"{clock((now - self.start[1]) / (step - self.start[0]) * max(0, total - step))} left")
        for name, form in (("loss", ".4f"), ("lr", ".3g")):
            if (value := number(self.step, name)) is not None:
                parts.append(f"{name} {value:{form}}")
        wait, batch = number(self.step, "data_wait_ms"), whole(self.config, "batch_size")
        if wait is not None and speed is not None and batch:
            parts.append(f"data wait {min(1.0, wait / 1000 * speed / batch):.0%}")
        parts.append(f"step {step}/{total}" if total else f"step {step}")
        share = max(0.0, min(1.0, step / total)) if total else None
        return f"epoch {epoch + 1}/{epochs if epochs is not None else '?'}", share, parts

    def _evaluated(self, record: Mapping[str, Any]) -> str:
        epoch, epochs = whole(record, "epoch"), whole(self.config, "epochs")
        parts = [f"epoch {'?' if epoch is None else epoch + 1}/{epochs or '?'}:"]
        parts[0] += "".join(
            f"{' ' if name == 'top1' else '  '}{name[:3]}-{name[3:]} {value:.2%}"
            for name in ("top1", "top5")
            if (value := number(record, name)) is not None
        )
        if (loss := number(record, "loss")) is not None:
            parts.append(f"loss {loss:.4f}")
        if (count := whole(record, "count")) is not None:
            parts.append(f"({count:,} images)")
        return "  ".join(parts)


def _at(when: float | None, line: str) -> list[str]:
    """A line with the time of day before it."""
    try:
        shown = time.strftime("%H:%M:%S", time.localtime(when)) if when is not None else "--:--:--"
    except (OverflowError, ValueError, OSError):  # a forged time
        shown = "--:--:--"
    line = line.strip().partition("\n")[0]
    return [f"{shown} {line if line.isprintable() else repr(line)[1:-1]}"]


def _started(record: Mapping[str, Any], config: Mapping[str, Any], again: bool) -> str:
    processes, resumed = whole(group(record, "world"), "size"), whole(record, "resumed_from")
    place = f"{'?' if processes is None else processes} process(es)"
    if again or resumed:
        return f"goes on from step {resumed or 0} on {place}"
    model, dataset = text(group(config, "model"), "model"), text(group(config, "data"), "dataset")
    day = number(record, "time")
    try:
        began = f", began {time.strftime('%Y-%m-%d', time.localtime(day))}" if day is not None else ""
    except (OverflowError, ValueError, OSError):
        began = ""
    return f"{text(config, 'recipe')}: {model} on {dataset}, batch {whole(config, 'batch_size')}, {place}{began}"


def _fault(record: Mapping[str, Any]) -> str:
    kind, step = text(record, "fault"), whole(record, "step")
    ranks = record.get("ranks")
    who = f", rank(s) {', '.join(map(str, ranks))}" if isinstance(ranks, list) and ranks else ""
    why = text(record, "cause") or text(record, "error")
    back = whole(record, "back_to")
    return (
        f"{kind} at step {step}{who}"
        + (f": {why}" if why else "")
        + (f"; back to step {back}" if back is not None else "")
    )


def _ended(record: Mapping[str, Any]) -> str:
    status, seconds, top1 = text(record, "status"), number(record, "seconds"), number(record, "top1")
    word = {"completed": "ended", "interrupted": "stopped"}.get(status, status or "ended")
    parts = [f"{word} after {duration(seconds)}" if seconds is not None and seconds >= 0 else word]
    parts.append(f"step {whole(record, 'steps')}")
    if top1 is not None:
        parts.append(f"top-1 {top1:.2%}")
    if error := text(record, "error"):
        parts.append(error.partition("\n")[0])
    return ", ".join(parts)
