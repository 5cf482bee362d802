"""The report of a hang: where each rank is, who holds up the rest, who waits for whom. Functions over positions."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from lockstep.errors import EXIT_HANG
from lockstep.watch.records import HangRecord

_CODE = {"loader": ("/torch/utils/data/", "/lockstep/data/"), "checkpoint": ("/lockstep/checkpoint/",)}
_WAITING = ("collective", "backward")  # kinds in which a rank waits for the others
_SHOWN_STACKS = 3  # of culprits, in the report that goes to the terminal; the file holds all


@dataclass(frozen=True)
class Position:
    """Where a rank is, as it posts it for the others. A heartbeat leaves out what only an answer to an alarm holds."""

    rank: int
    step: int
    phase: str
    stalled_s: float  # since its main thread last moved
    collectives: int | None  # entered so far; None where the backend does not count
    state: str  # running, long phase (announced, see Heartbeat.long_phase), finished
    host: str
    machine: str
    pid: int
    born: int
    beats: int = 0  # heartbeats posted so far
    kind: str = ""  # collective, backward, loader, checkpoint, python
    where: str = ""
    stacks: str = ""
    workers: list[str] = field(default_factory=list)  # what each of its loader workers is doing, with its stacks
    seen: dict[str, str] = field(default_factory=dict)  # other ranks of its machine -> what their processes are doing

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes | str) -> "Position":
        """The inverse of `dump`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Report:
    """A hang, for the journal, the terminal and the file of details."""

    culprits: tuple[int, ...]  # empty where no rank stands out
    step: int
    cause: str
    text: str  # for the terminal
    details: str  # all stacks, for the file

    def record(self) -> HangRecord:
        """For the journal."""
        return HangRecord(kind="fault", fault="hang", step=self.step, ranks=list(self.culprits), cause=self.cause)


def activity(frames: Sequence[tuple[str, int, str]], phase: str) -> tuple[str, str]:
    """What a thread does by its stack (innermost frame first) and the phase that it announced: (kind, where)."""
    frames = [(file.replace("\\", "/"), line, name) for file, line, name in frames]
    if not frames:
        return "python", "ended"
    inside = list(takewhile(lambda frame: "/torch/distributed/" in frame[0], frames))
    if inside:
        names = [name for _, _, name in inside if name != "wrapper"]
        return "collective", f"{names[-1]}{_called_from(frames[len(inside) :])}"
    file, _, name = frames[0]
    if name == "_engine_run_backward":
        return "backward", f"the backward pass, with its all-reduces{_called_from(frames[1:])}"
    if "/lockstep/parallel/" in file:
        return "collective", _place(frames[0])
    for kind, parts in _CODE.items():
        if phase == kind or any(part in file for file, _, _ in frames for part in parts):
            return kind, _place(frames[0])
    return "python", _place(frames[0])


def _place(frame: tuple[str, int, str]) -> str:
    file, line, name = frame
    return f"{name} ({'/'.join(file.split('/')[-2:])}:{line})"


def _called_from(frames: Iterable[tuple[str, int, str]]) -> str:
    caller = next((frame for frame in frames if "/torch/" not in frame[0]), None)
    return f", called from {_place(caller)}" if caller else ""


def diagnose(size: int, answers: Mapping[int, Position], beats: Mapping[int, Position]) -> tuple[tuple[int, ...], str]:
    """The ranks that the others wait for, and why.

    Args:
        size: number of ranks.
        answers: the ranks that answered the alarm.
        beats: the last heartbeat of each rank that ever sent one.
    """
    # a rank that has finished need not answer
    left = {r for r, beat in beats.items() if r not in answers and beat.state == "finished"}
    if silent := tuple(r for r in range(size) if r not in answers and r not in left):
        return silent, "; ".join(_silence(r, answers, beats.get(r)) for r in silent)
    live = {r: p for r, p in answers.items() if p.state != "finished"}
    left |= answers.keys() - live.keys()
    waiting = {r: p for r, p in live.items() if p.kind in _WAITING}
    busy = {r: p for r, p in live.items() if r not in waiting}
    counts = {r: p.collectives for r, p in live.items() if p.collectives is not None}
    if len(set(counts.values())) > 1:
        # with a GPU a rank waits wherever it next asks for a result: those that entered most wait, whatever they show
        busy = {r: p for r, p in busy.items() if counts.get(r, 0) < max(counts.values())} or busy
    if busy:
        return tuple(sorted(busy)), "; ".join(_busy(p) for _, p in sorted(busy.items()))
    if left:
        text = f"{name_ranks(left)} finished and left, while the others still wait for a collective"
        return tuple(sorted(left)), text
    for what in (counts, {r: (p.step, p.where) for r, p in waiting.items()}):
        if len(set(what.values())) > 1:
            return _odd_ones(waiting, what)
    if size == 1:
        return (0,), _busy(answers[0])
    return (), "all ranks wait in the same collective: look at the network, or the GPUs' links, between them"


def _silence(rank: int, answers: Mapping[int, Position], beat: Position | None) -> str:
    if beat is None:
        return f"rank {rank} never sent a heartbeat: it did not get as far as training"
    seen = [p.seen[str(rank)] for p in answers.values() if str(rank) in p.seen]
    unknown = "it is stopped, swapping or dead, or its machine is lost or cut off"
    most = max(seen, key=len, default=unknown)  # the rank that listened to it knows most
    silent = f"rank {rank} (pid {beat.pid} on {beat.host}) is silent at step {beat.step}, {beat.phase}"
    return f"{silent}: {_first_line(most)}"


def _busy(p: Position) -> str:
    what = {"loader": "waits for its loader", "checkpoint": "is writing a checkpoint", "python": "is in its own code"}
    text = f"rank {p.rank} {what.get(p.kind, 'is')} at step {p.step}, for {p.stalled_s:.1f} s: {p.where}"
    return "; ".join([text, *(_first_line(worker) for worker in p.workers if p.kind == "loader")])


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _odd_ones(waiting: Mapping[int, Position], what: Mapping[int, Any]) -> tuple[tuple[int, ...], str]:
    """All wait, though not at the same place: the minority is named, or where there is none those that are behind."""
    value, often = Counter(what.values()).most_common(1)[0]
    common = value if often * 2 > len(what) else max(what.values())
    odd = tuple(sorted(r for r in what if what[r] != common))
    rest = [r for r in what if r not in odd]
    firsts = [(group, waiting[group[0]]) for group in (odd, rest)]
    described = "; ".join(f"{name_ranks(g)} at step {p.step}, {_counted(p)}, in {p.where}" for g, p in firsts)
    counted = isinstance(common, int)
    ahead = counted and any(what[r] > common for r in odd)
    skipped = "skipped a collective" if counted else "skipped a collective or took another way"
    slip = "entered one collective more" if ahead else skipped
    note = "" if often * 2 > len(what) else " (or the others did not; they are equally many)"
    return odd, f"{name_ranks(odd)} {slip}{note}: {described}"


def _counted(p: Position) -> str:
    return "collectives not counted" if p.collectives is None else f"after {p.collectives} collectives"


def name_ranks(ranks: Iterable[int]) -> str:
    """As `rank 2` or `ranks 0, 1`."""
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names}" if "," in names else f"rank {names}"


def report(
    timeout: float, size: int, answers: Mapping[int, Position], beats: Mapping[int, Position], file: str = ""
) -> Report:
    """The report of a rank that can ask the others. `file`: where its details will stand."""
    culprits, cause = diagnose(size, answers, beats)
    step = max((p.step for p in {**beats, **answers}.values()), default=0)
    others = [r for r in answers if r not in culprits and answers[r].state != "finished"]
    lines = [_headline("the run", step, timeout), cause]
    if culprits and others:
        lines.append(f"{name_ranks(others)} wait{'s' * (len(others) == 1)} for {name_ranks(culprits)}")
    lines += [f"  {_line(r, answers.get(r), beats.get(r))}" for r in range(size)]
    chosen = [*[r for r in culprits if r in answers][:_SHOWN_STACKS], *others[:1]]
    short = [_stacks(answers[r], main_only=True) for r in chosen]
    long = [_stacks(p, main_only=False) for _, p in sorted(answers.items())]
    seen = [(r, p.rank, text) for p in answers.values() for r, text in p.seen.items() if int(r) in culprits]
    outside = [f"Rank {rank}, as rank {by} sees it: {text}" for rank, by, text in seen]
    short += [text.partition("\n\n")[0] for text in outside if "\n" in text]
    long += outside
    ending = [f"Stacks of all threads and ranks: {file}"] if file else []
    text, details = "\n".join([*lines, *short, *ending]), "\n\n".join(["\n".join(lines), *long])
    return Report(culprits, step, cause, text, details + "\n")


def report_without_store(timeout: float, mine: Position, seen: Mapping[int, str], why: str) -> Report:
    """The report of a rank that can't ask the others. `seen`: what the processes of other ranks on its machine do."""
    stopped = tuple(rank for rank, text in seen.items() if "stopped" in text)
    cause = f"the store where the ranks meet is lost: {why}"
    lines = [_headline(f"rank {mine.rank}", mine.step, timeout), cause, f"  {_line(mine.rank, mine, None)}"]
    lines += [f"  rank {rank}: its process is {text}" for rank, text in sorted(seen.items())]
    text = "\n".join([*lines, _stacks(mine, main_only=True)])
    return Report(stopped, mine.step, cause, text, "\n".join([*lines, _stacks(mine, main_only=False)]) + "\n")


def _headline(who: str, step: int, timeout: float) -> str:
    return f"{who} hangs at step {step}: no progress for {timeout:g} s (--hang-timeout); it ends with code {EXIT_HANG}"


def _line(rank: int, answer: Position | None, beat: Position | None) -> str:
    p = answer or beat
    if p is None:
        return f"rank {rank}: never heard of"
    if answer is None:
        if p.state == "finished":
            return f"rank {rank}  step {p.step}  finished  {_counted(p)}"
        return f"rank {rank}  step {p.step}  {p.phase}  {_counted(p)}  no answer (last heard; pid {p.pid} on {p.host})"
    place = f"in {p.where}" if p.state != "finished" else "finished"
    where = f"{p.phase} for {p.stalled_s:.1f} s  {_counted(p)}  {place}"
    return f"rank {rank}  step {p.step}  {where}  (pid {p.pid} on {p.host})"


def _stacks(p: Position, main_only: bool) -> str:
    if not main_only:
        return "\n".join([f"Stacks of rank {p.rank}:", p.stacks, *p.workers])
    workers = [worker.partition("\n\n")[0] for worker in p.workers if p.kind == "loader"]
    return "\n".join([f"Stack of rank {p.rank}:", p.stacks.partition("\n\n")[0], *workers])
