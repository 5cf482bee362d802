"""What happened in a run: its journal read once, in memory that does not grow with it."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from lockstep.commands.watch import describe
from lockstep.monitoring.runs import RunSummary, integer, mapping, number, text

Point = tuple[int, float, float]  # step, seconds at work, value
TRAINING = ("loss", "lr", "images_per_s", "data_wait_ms", "comm_wait_ms")  # of `step` records
EVALUATION = ("top1", "top5", "loss")  # of `eval` records
# what time goes for
SPENT = (
    "training", "waiting for data", "waiting for gradients", "checkpoints", "evaluation", "other", "between starts",
)  # fmt: skip
_ENDS = 60  # starts and events that are kept from the beginning, and from the end

T = TypeVar("T")


class Curve:
    """Points by step, thinned: it keeps the lowest and the highest of each stretch of steps, and the newest."""

    def __init__(self, stretches: int) -> None:
        self._most, self._width = stretches, 1
        self._stretches: dict[int, tuple[Point, Point]] = {}  # by number: lowest, highest
        self._newest: list[Point] = []

    def add(self, point: Point) -> None:
        """The next point."""
        self._newest = [point]
        self._put(point)
        if len(self._stretches) > self._most:
            self._width *= 2
            before, self._stretches = self._stretches, {}
            for pair in before.values():
                for old in pair:
                    self._put(old)

    def _put(self, point: Point) -> None:
        number = point[0] // self._width
        low, high = self._stretches.get(number, (point, point))
        self._stretches[number] = (point if point[2] < low[2] else low), (point if point[2] > high[2] else high)

    def cut(self, step: int) -> None:
        """Forget the points of later steps, which are trained again."""
        left = [point for point in self.points if point[0] <= step]
        self._stretches, self._newest = {}, left[-1:]
        for point in left:
            self._put(point)

    @property
    def points(self) -> list[Point]:
        """Those that are left, by step."""
        return sorted({*(point for pair in self._stretches.values() for point in pair), *self._newest})


class Ends(Generic[T]):
    """The first and the last few of things, and how many there were."""

    def __init__(self) -> None:
        self._first: list[T] = []
        self._last: deque[T] = deque(maxlen=_ENDS)
        self.count = 0

    def append(self, item: T) -> None:
        """The next one."""
        self.count += 1
        (self._first if len(self._first) < _ENDS else self._last).append(item)

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        yield from self._last


@dataclass
class Start:
    """From one `run` record to the next: a start, a restart or a resume."""

    run: Mapping[str, Any]  # its record
    pause: float  # seconds since the last record of the start before
    seconds: float = 0.0  # to its last record
    ended: str = ""  # the status of its `end` record, or "resized"; empty where there is none

    @property
    def processes(self) -> int:
        """How many; 0: not known."""
        return integer(mapping(self.run, "world"), "size") or 0


class History:
    """All that a report shows of a run's journal, whoever wrote it: what is missing or makes no sense is left out.

    Seconds at work leave out the pauses between two starts.
    """

    def __init__(self, folder: Path, records: Iterable[dict[str, Any]], stretches: int = 400) -> None:
        self.run, self._stretches = RunSummary(folder), stretches
        self.starts, self.events = Ends[Start](), Ends[tuple[float, str]]()  # an event: seconds at work, a sentence
        self.processes: list[int] = []  # of the starts, without repetitions; the first few
        self.curves: dict[str, Curve] = {}  # "train loss", "eval top1", "stall_ms", ...
        self.resumes: list[tuple[int, float, str]] = []  # step, seconds at work, on what; the first few
        self.spent = dict.fromkeys(SPENT, 0.0)
        self.trained_again = self._step = 0  # steps
        self.work = 0.0  # seconds
        self._end_event: tuple[float, str] | None = None
        self._newest: Start
        for record in records:
            self._add(record)
        self._note_end()
        self.spent["other"] = max(0.0, self.work - sum(self.spent.values()) + self.spent["between starts"])

    def _add(self, record: dict[str, Any]) -> None:
        kind, now, before = record["kind"], number(record, "time"), number(self.run.last, "time")
        passed = max(0.0, now - before) if now is not None and before is not None else 0.0
        if kind == "run" or not self.starts.count:
            self._start(record, passed)
            passed = 0.0
        self.work += passed
        self._newest.seconds += passed
        if text(record, "fault") == "restart":
            self._end_event = None  # the restart has the cause, the end what a rank saw that lost the other
        self._note_end()
        if kind not in ("step", "eval") and (sentence := describe(record, self.run)):
            if kind == "end":
                self._end_event = (self.work, sentence)
            else:
                self.events.append((self.work, sentence))
        if kind == "fault" and (back := integer(record, "back_to")) is not None:
            self._go_back(back)
        if kind == "end":
            self._newest.ended = text(record, "status") or "ended"
        if (step := integer(record, "step")) is not None:
            if kind == "step":
                self._spend_on_steps(record, step)
            elif kind == "eval" and self.run.last.get("kind") == "step":
                self.spent["evaluation"] += passed
            self._note_numbers(record, step)
        self.run.add(record)

    def _note_end(self) -> None:
        if self._end_event is not None:
            self.events.append(self._end_event)
            self._end_event = None

    def _start(self, record: dict[str, Any], passed: float) -> None:
        pause = passed if self.starts.count else 0.0
        if self.starts.count and "resized_from" in record:
            self._newest.ended = "resized"
        self._newest = Start({name: value for name, value in record.items() if name != "config"}, pause)
        self.starts.append(self._newest)
        self.spent["between starts"] += pause
        if self._newest.processes not in (0, *self.processes[-1:]) and len(self.processes) < 10:
            self.processes.append(self._newest.processes)
        self._go_back(integer(record, "resumed_from") or 0)
        if self.starts.count > 1 and len(self.resumes) < _ENDS:
            on = f"goes on from step {self._step} on {self._newest.processes} process(es)"
            self.resumes.append((self._step, self.work, on))

    def _go_back(self, step: int) -> None:
        """Forget what was trained after a step: it is trained again."""
        self.trained_again += max(0, self._step - step)
        self._step = step
        for curve in self.curves.values():
            curve.cut(step)

    def _spend_on_steps(self, record: Mapping[str, Any], step: int) -> None:
        """The time of the steps since the last such record: for training, and for waiting."""
        steps, speed, self._step = max(0, step - self._step), number(record, "images_per_s"), step
        if not step or not speed or speed < 0:
            return
        left = (integer(record, "samples") or 0) / step * steps / speed
        waits = (("waiting for data", "data_wait_ms"), ("waiting for gradients", "comm_wait_ms"))
        for what, name in waits:
            wait = max(0.0, min(left, (number(record, name) or 0.0) * steps / 1e3))
            self.spent[what] += wait
            left -= wait
        self.spent["training"] += left

    def _note_numbers(self, record: Mapping[str, Any], step: int) -> None:
        found = {
            "step": [(f"train {name}", name) for name in TRAINING],
            "eval": [(f"eval {name}", name) for name in EVALUATION],
            "checkpoint": [("stall_ms", "stall_ms")],
        }.get(record["kind"], [])
        for curve, name in found:
            if (value := number(record, name)) is not None:
                self.curves.setdefault(curve, Curve(self._stretches)).add((step, self.work, value))
        if record["kind"] == "checkpoint":
            self.spent["checkpoints"] += max(0.0, (number(record, "stall_ms") or 0.0) / 1e3)

    @property
    def steps_per_epoch(self) -> int | None:
        """Of the last start."""
        return integer(self.run.of("run"), "steps_per_epoch")

    def points(self, curve: str) -> list[Point]:
        """Of a curve; none where there is no such number."""
        return self.curves[curve].points if curve in self.curves else []
