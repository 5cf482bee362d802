"""What a run's journal tells: attempts one after the other, what they trained, and what happened to them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.commands.report.spent import rollbacks, spent
from lockstep.commands.report.values import count, texts
from lockstep.watch.outside import group, number, text

Series = list[tuple[int, float, float]]  # step, seconds at work, value
NUMBERS = ("loss", "lr", "images_per_s", "data_wait_ms", "comm_wait_ms")  # of `step` records
SCORES = ("top1", "top5", "loss", "macro_f1", "calibration_error")  # of `eval` records


@dataclass
class Attempt:
    """From one `run` record to the next: a start, a restart or a resume. Seconds at work: pauses are left out."""

    processes: int  # 0: unknown
    resumed_from: int
    started: float  # seconds since 1970
    at: float  # seconds at work before it
    seconds: float = 0.0  # to its last record
    pause: float = 0.0  # seconds between the last record of the attempt before and its first
    last_step: int = 0
    kept_to: int | None = None  # the step that the next attempt went on from, where that is before `last_step`
    status: str = ""  # of its `end` record; empty where there is none
    error: str = ""
    restarted: str = ""  # why the launcher started its processes again
    backend: str = ""
    threads: int = 0
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Event:
    """Something that happened beside training. `kind`: start, resume, fault, lost, stop or end."""

    kind: str
    step: int
    seconds: float  # at work
    attempt: int  # from 0
    text: str


@dataclass
class Story:
    """All of it. Series hold what counts: steps that were trained again stand there once, as of the last time."""

    attempts: list[Attempt] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    train: dict[str, Series] = field(default_factory=dict)
    evals: dict[str, Series] = field(default_factory=dict)
    stalls: Series = field(default_factory=list)  # ms that a checkpoint stopped training
    spent: dict[str, float] = field(default_factory=dict)  # seconds at work, by what for
    classes: Mapping[str, Any] | None = None  # the last record of that kind
    end: Mapping[str, Any] | None = None  # of the last attempt
    steps_per_epoch: float | None = None
    damaged: int = 0  # lines that can't be read


def story(records: Sequence[Mapping[str, Any]], damaged: int = 0) -> Story:
    """What the records tell, whoever wrote them: what is missing or makes no sense is left out."""
    told = Story(damaged=damaged)
    attempts = _attempts(records)
    told.steps_per_epoch = _steps_per_epoch(records)
    bounds = [count(part[0], "resumed_from") for part in attempts[1:]] + [None] * bool(attempts)
    at, before = 0.0, 0.0
    for number_, (part, bound) in enumerate(zip(attempts, bounds, strict=True)):
        times = [t for record in part if (t := number(record, "time")) is not None]
        began, ended = (min(times), max(times)) if times else (before, before)
        attempt = _attempt(part, began, at)
        attempt.pause = max(0.0, began - before) if number_ and before else 0.0
        attempt.seconds = ended - began
        told.attempts.append(attempt)
        _tell(told, part, number_, bound)
        for what, seconds in spent(part, attempt.resumed_from, attempt.seconds, bound).items():
            told.spent[what] = told.spent.get(what, 0.0) + seconds
        at, before = at + attempt.seconds, ended
    told.spent["between attempts"] = sum(attempt.pause for attempt in told.attempts)
    told.end = attempts[-1][-1] if attempts and attempts[-1][-1].get("kind") == "end" else None
    for name, series in [*told.train.items(), *told.evals.items(), ("", told.stalls)]:
        series.sort()
        if name:
            series[:] = _last_of_each(series)
    return told


def _attempts(records: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    parts: list[list[Mapping[str, Any]]] = []
    for record in records:
        if record.get("kind") == "run" or not parts:
            parts.append([])
        parts[-1].append(record)
    return parts


def _steps_per_epoch(records: Sequence[Mapping[str, Any]]) -> float | None:
    """As a `run` record says; an older journal tells by an evaluation, or by an epoch's last step record."""
    said = [n for record in records if record.get("kind") == "run" and (n := count(record, "steps_per_epoch"))]
    if said:
        return float(said[-1])
    before = None
    for record in records:
        step, epoch = count(record, "step"), count(record, "epoch")
        if record.get("kind") not in ("step", "eval") or not step or epoch is None:
            continue
        if record["kind"] == "eval":
            return step / (epoch + 1)
        if before is not None and epoch == before[1] + 1:
            return float(before[0]) / epoch
        before = step, epoch
    return None


def _attempt(part: Sequence[Mapping[str, Any]], began: float, at: float) -> Attempt:
    run = part[0] if part[0].get("kind") == "run" else {}
    world, last = group(run, "world"), next((r for r in reversed(part) if r.get("fault") != "restart"), part[-1])
    steps = [step for record in part if record.get("kind") == "step" and (step := count(record, "step")) is not None]
    ended = last.get("kind") == "end"
    if ended and (step := count(last, "steps")) is not None:
        steps.append(step)
    resumed = count(run, "resumed_from") or 0
    return Attempt(
        processes=count(world, "size") or (count(last, "processes") or 0 if ended else 0),
        resumed_from=resumed,
        started=began,
        at=at,
        last_step=max(steps, default=resumed),
        status=text(last, "status") if ended else "",
        error=text(last, "error") if ended else "",
        backend=text(world, "backend"),
        threads=count(run, "threads") or 0,
        devices=texts(run, "devices"),
        versions={str(k): v for k, v in group(run, "versions").items() if isinstance(v, str)},
        data={str(k): v for k, v in group(run, "data").items() if isinstance(v, str)},
        parameters=count(run, "parameters") or 0,
        notes=texts(run, "notes"),
    )


def _tell(told: Story, part: Sequence[Mapping[str, Any]], place: int, bound: int | None) -> None:
    """Add one attempt's numbers and events. `bound`: the step that the next one goes on from."""
    attempt = told.attempts[-1]

    def event(kind: str, step: int, seconds: float, words: str) -> None:
        told.events.append(Event(kind, step, seconds, place, words))

    on = f" on {attempt.processes} process{'es' if attempt.processes != 1 else ''}" if attempt.processes else ""
    if place or attempt.resumed_from:
        event("resume", attempt.resumed_from, attempt.at, f"goes on from step {attempt.resumed_from}{on}")
    else:
        event("start", 0, attempt.at, f"starts{on}")
    rolled_back = rollbacks(part)
    for index, record in enumerate(part):
        kind, step = record.get("kind"), count(record, "step")
        when = number(record, "time")
        seconds = attempt.at + (when - attempt.started if when is not None else 0.0)
        if record.get("fault") == "restart":
            attempt.restarted = text(record, "cause")
        elif kind == "fault":
            event("fault", step or 0, seconds, _fault(record))
        elif kind == "stop":
            event("stop", step or 0, seconds, f"ends early: {text(record, 'reason') or 'for a reason of its own'}")
        if step is None:
            continue
        if kind == "checkpoint" and (stall := number(record, "stall_ms")) is not None:
            told.stalls.append((step, seconds, stall))
        if (bound is not None and step > bound) or step > rolled_back[index]:
            continue  # it was trained again
        names, into = {"step": (NUMBERS, told.train), "eval": (SCORES, told.evals)}.get(str(kind), ((), {}))
        for name in names:
            if (value := number(record, name)) is not None:
                into.setdefault(name, []).append((step, seconds, value))
        if kind == "classes":
            told.classes = record
    if bound is not None and bound < attempt.last_step:
        attempt.kept_to = bound
    event(*_ending(attempt, last=bound is None))


def _fault(record: Mapping[str, Any]) -> str:
    name = text(record, "fault") or "fault"
    if name == "hang":
        return f"hang: {text(record, 'cause')}"
    if name == "rollback":
        return f"rollback to step {count(record, 'back_to') or 0}: {text(record, 'error')}"
    if name == "skip":
        return "a gradient was not finite; the step was left out"
    return f"{name}: {text(record, 'cause')}"


def _ending(attempt: Attempt, last: bool) -> tuple[str, int, float, str]:
    seconds, step = attempt.at + attempt.seconds, attempt.last_step
    again = ""
    if attempt.kept_to is not None:
        one = attempt.kept_to + 1 == step
        again = (
            f"; step {step} is trained again" if one else f"; steps {attempt.kept_to + 1} to {step} are trained again"
        )
    if attempt.status == "completed":
        return "end", step, seconds, "completed"
    if attempt.restarted:
        return "lost", step, seconds, f"{attempt.restarted}; its processes are started again{again}"
    if attempt.status == "interrupted":
        return "stop", step, seconds, f"stopped after a signal or --max-time{again}"
    if attempt.status:
        return "lost", step, seconds, f"{attempt.status}: {attempt.error or 'no reason given'}{again}"
    if last:
        return "lost", step, seconds, "no end is recorded: it still runs, or was killed"
    return "lost", step, seconds, f"ended without a word, as what is killed does{again}"


def _last_of_each(series: Series) -> Series:
    """One value a step: the one that came last."""
    return list({step: (step, seconds, value) for step, seconds, value in series}.values())
