"""The report of a hang: where each rank is, who holds up the rest, who waits for whom. Functions over positions."""

import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from lockstep.errors import EXIT_HANG
from lockstep.monitoring.journal import FaultRecord

_CODE = {"loader": ("/torch/utils/data/", "/lockstep/data/"), "checkpoint": ("/lockstep/checkpoint/",)}
_WAITING = ("collective", "backward")  # kinds in which a rank waits for the others
_SHOWN_STACKS = 3  # of culprits, in the report that goes to the terminal; the file holds all
_LONGEST = 12_000  # characters of one process's stacks


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
    workers: list[str] = field(default_factory=list)  # what each of its loader workers is doing
    seen: dict[str, str] = field(default_factory=dict)  # other ranks of its machine -> what their processes are doing

    @property
    def counted(self) -> str:
        """Its collectives in words."""
        return "collectives not counted" if self.collectives is None else f"after {self.collectives} collectives"


def activity(frames: Sequence[tuple[str, int, str]], phase: str) -> tuple[str, str]:
    """What a thread does by its stack (innermost frame first) and the phase that it announced: (kind, where)."""
    frames = [(file.replace("\\", "/"), line, name) for file, line, name in frames]
    if not frames:
        return "python", "ended"

    def place(frame: tuple[str, int, str]) -> str:
        file, line, name = frame
        return f"{name} ({'/'.join(file.split('/')[-2:])}:{line})"

    def called_from(outer: Iterable[tuple[str, int, str]]) -> str:
        caller = next((frame for frame in outer if "/torch/" not in frame[0]), None)
        return f", called from {place(caller)}" if caller else ""

    inside = list(takewhile(lambda frame: "/torch/distributed/" in frame[0], frames))
    if inside:
        names = [name for _, _, name in inside if name != "wrapper"]
        return "collective", f"{names[-1]}{called_from(frames[len(inside) :])}"
    file, _, name = frames[0]
    if name == "_engine_run_backward":
        return "backward", f"the backward pass, with its all-reduces{called_from(frames[1:])}"
    if "/lockstep/parallel/" in file:
        return "collective", place(frames[0])
    for kind, parts in _CODE.items():
        if phase == kind or any(part in file for file, _, _ in frames for part in parts):
            return kind, place(frames[0])
    return "python", place(frames[0])


def diagnose(size: int, answers: Mapping[int, Position], beats: Mapping[int, Position]) -> tuple[tuple[int, ...], str]:
    """The ranks that the others wait for, and why, by those that answered the alarm and all ranks' last heartbeats."""
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
    unknown = "it is stopped, swapping or dead, or its machine is lost or cut off"
    # the rank that listened to it knows most
    seen = max((p.seen[str(rank)] for p in answers.values() if str(rank) in p.seen), key=len, default=unknown)
    return f"rank {rank} (pid {beat.pid} on {beat.host}) is silent at step {beat.step}, {beat.phase}: {seen}"


def _busy(p: Position) -> str:
    doing = {"loader": "waits for its loader", "checkpoint": "is writing a checkpoint", "python": "is in its own code"}
    text = f"rank {p.rank} {doing.get(p.kind, 'is')} at step {p.step}, for {p.stalled_s:.1f} s: {p.where}"
    return "; ".join([text, *(p.workers if p.kind == "loader" else ())])


def _odd_ones(waiting: Mapping[int, Position], what: Mapping[int, Any]) -> tuple[tuple[int, ...], str]:
    """All wait, though not at the same place: the minority is named, or where there is none those that are behind."""
    value, often = Counter(what.values()).most_common(1)[0]
    majority = often * 2 > len(what)
    common = value if majority else max(what.values())
    odd = tuple(sorted(r for r in what if what[r] != common))
    rest = [r for r in what if r not in odd]
    firsts = [(group, waiting[group[0]]) for group in (odd, rest)]
    described = "; ".join(f"{name_ranks(g)} at step {p.step}, {p.counted}, in {p.where}" for g, p in firsts)
    if not isinstance(common, int):
        slip = "skipped a collective or went another path"
    else:
        slip = "entered one collective more" if any(what[r] > common for r in odd) else "skipped a collective"
    note = "" if majority else " (or the others did not; they are equally many)"
    return odd, f"{name_ranks(odd)} {slip}{note}: {described}"


def name_ranks(ranks: Iterable[int]) -> str:
    """As `rank 2` or `ranks 0, 1`."""
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names}" if "," in names else f"rank {names}"


def report(
    timeout: float, size: int, answers: Mapping[int, Position], beats: Mapping[int, Position], file: str, lost: str = ""
) -> tuple[FaultRecord, str, str]:
    """A hang for the journal, the terminal and, with all stacks, `file`; `lost`: why the others could not be asked."""
    culprits, cause = diagnose(size, answers, beats)
    if lost:
        cause = f"the store where the ranks meet is lost: {lost}; {cause}"
    step = max((p.step for p in {**beats, **answers}.values()), default=0)
    others = [r for r in answers if r not in culprits and answers[r].state != "finished"]
    ending = f"no progress for {timeout:g} s (--hang-timeout); it ends with code {EXIT_HANG}"
    lines = [f"the run hangs at step {step}: {ending}", cause]
    if culprits and others:
        lines.append(f"{name_ranks(others)} wait{'s' * (len(others) == 1)} for {name_ranks(culprits)}")
    lines += [f"  {_line(r, answers.get(r), beats.get(r))}" for r in range(size)]
    chosen = [*[r for r in culprits if r in answers][:_SHOWN_STACKS], *others[:1]]
    short = [f"Stack of rank {r}:\n" + answers[r].stacks.partition("\n\n")[0] for r in chosen]
    more = [f"Stacks of all threads and ranks: {file}"] if file else []
    stacks = ["\n".join([f"Stacks of rank {r}:", p.stacks, *p.workers]) for r, p in sorted(answers.items())]
    details = "\n\n".join(["\n".join(lines), *stacks]) + "\n"
    record = FaultRecord(kind="fault", fault="hang", step=step, ranks=list(culprits), cause=cause)
    return record, "\n".join([*lines, *short, *more]), details


def _line(rank: int, answer: Position | None, beat: Position | None) -> str:
    p = answer or beat
    if p is None:
        return f"rank {rank}: never heard of"
    process = f"pid {p.pid} on {p.host}"
    if p.state == "finished":
        where = f"finished  {p.counted}  ({process})"
    elif answer is None:
        where = f"{p.phase}  {p.counted}  no answer (last heard; {process})"
    else:
        where = f"{p.phase} for {p.stalled_s:.1f} s  {p.counted}  in {p.where}  ({process})"
    return f"rank {rank}  step {p.step}  {where}"


def frames_of(ident: int | None) -> list[tuple[str, int, str]]:
    """(file, line, function) of a thread's Python frames, the innermost first."""
    innermost = sys._current_frames().get(ident or 0)
    frames = traceback.walk_stack(innermost) if innermost else ()  # without one it would walk its caller's
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def own_stacks() -> str:
    """The stacks of this process's threads but the heartbeat's; the main one first."""
    main, parts = threading.main_thread().ident, []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident in sorted(sys._current_frames(), key=lambda ident: ident != main):
        if not (name := names.get(ident, "a thread")).startswith("lockstep"):
            lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames_of(ident)]
            parts.append("\n".join([f"{name} (most recent call first):", *lines]))
    return "\n\n".join(parts)[:_LONGEST]
