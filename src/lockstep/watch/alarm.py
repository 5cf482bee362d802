"""What the ranks do once one of them raises an alarm: answer, agree on who reports, report, and end."""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from lockstep.errors import EXIT_HANG
from lockstep.processes import proc
from lockstep.processes.signals import exit_now
from lockstep.watch import stacks
from lockstep.watch.hang import Position, Report, report, report_without_store
from lockstep.watch.records import HangRecord

REPORT = "hang-report.txt"
_ANSWER_S = 1.5  # what the ranks get to answer
_REPORT_S = 2.0  # what the reporting rank then gets, on a disk that may be the very cause
LONGEST_S = _ANSWER_S + _REPORT_S
_POLL_S = 0.05

OnHang = Callable[[HangRecord], None]


@dataclass
class Board:
    """Where ranks post their positions, in the run's store. Every method may raise RuntimeError: the store is lost.

    The key "alarm" asks every rank where it is; "reporter" has the rank that reports, "reported" that it has done so.
    """

    store: Store
    rank: int
    size: int
    peers: dict[int, Position] = field(default_factory=dict)  # the last heartbeats read

    def post(self, what: str, position: Position) -> None:
        """Post this rank's position as "at" (a heartbeat) or "answer"."""
        self.store.set(f"{what}/{self.rank}", position.dump())

    def has(self, what: str, *ranks: int) -> bool:
        """True where these ranks, or all, have posted; one request."""
        return self.store.check([f"{what}/{rank}" for rank in ranks or range(self.size)])

    def read(self, what: str, *ranks: int) -> dict[int, Position]:
        """What these ranks, or all, posted last, of those that did."""
        ranks = ranks or tuple(range(self.size))
        if not self.has(what, *ranks):
            ranks = tuple(rank for rank in ranks if self.has(what, rank))
        texts = self.store.multi_get([f"{what}/{rank}" for rank in ranks]) if ranks else []
        found = {rank: Position.load(text) for rank, text in zip(ranks, texts, strict=True)}
        if what == "at":
            self.peers.update(found)
        return found


@dataclass(frozen=True)
class Reporter:
    """Where a report goes."""

    timeout: float  # --hang-timeout, for the text
    file: Path | None  # for the details
    on_hang: OnHang | None

    def write(self, found: Report) -> None:
        """To stderr, to the file and to the callback; what fails is printed and does not keep the run from ending."""
        print(f"lockstep: {found.text}", file=sys.stderr, flush=True)
        try:
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(found.details)
            if self.on_hang is not None:
                self.on_hang(found.record())
        except Exception:
            traceback.print_exc()


def respond(
    board: Board, reporter: Reporter, answer: Callable[..., Position], watched: int, silent_s: float
) -> NoReturn:
    """Post where this rank is, wait for the others' answers, report if no lower rank does, and end this process.

    Args:
        answer: this rank's position, with more fields given.
        watched: the rank whose heartbeat this one follows, silent for `silent_s` by now.
    """
    me, here = str(board.rank), proc.machine()
    try:
        began = time.monotonic()
        seen = {
            str(p.rank): f"its process is {proc.state(p.pid, p.born)}"
            for p in board.read("at").values()
            if p.rank != board.rank and p.machine == here and p.state != "finished"
        }
        if silent_s > 1:
            neighbour = seen.get(str(watched), "it is on another machine")
            seen[str(watched)] = f"no heartbeat for {silent_s:.1f} s; {neighbour}{_stacks_of(board.peers.get(watched))}"
        board.post("answer", answer(seen=seen))
        while time.monotonic() - began < _ANSWER_S and not board.has("answer"):
            time.sleep(_POLL_S)
        lowest = next(rank for rank in range(board.size) if board.has("answer", rank))
        may_report = board.rank == lowest or not _wait_for_report(board)
        if may_report and board.store.compare_set("reporter", "", me) == me.encode():  # the first rank that asks
            answers = board.read("answer")
            reporter.write(report(reporter.timeout, board.size, answers, board.read("at"), str(reporter.file or "")))
            board.store.set("reported", "1")
            time.sleep(4 * _POLL_S)  # this process may hold the store: let the others read that
        else:
            _wait_for_report(board)
    except RuntimeError as error:
        report_alone(board, reporter, answer, store_error(error))
    for p in board.peers.values():
        # it finds the alarm and leaves too, where a launcher would wait long for it to heed a SIGTERM
        if p.rank != board.rank and p.machine == here:
            proc.wake(p.pid, p.born)
    exit_now(EXIT_HANG)


def report_alone(board: Board, reporter: Reporter, answer: Callable[[], Position], why: str) -> NoReturn:
    """The store is lost: report what can be seen from this rank, and end this process."""
    mine = answer()
    seen = {
        p.rank: proc.state(p.pid, p.born) if p.machine == mine.machine else f"on another machine, {p.host}"
        for p in board.peers.values()
        if p.rank != mine.rank
    }
    reporter.write(report_without_store(reporter.timeout, mine, seen, why))
    exit_now(EXIT_HANG)


def store_error(error: Exception) -> str:
    """Why the store no longer answers, in a line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _wait_for_report(board: Board) -> bool:
    """Wait until the reporting rank has reported; False where it did not in time."""
    deadline = time.monotonic() + _REPORT_S / 2
    while time.monotonic() < deadline:
        try:
            if board.store.check(["reported"]):
                return True
        except RuntimeError:  # the store went with the rank that held it, which reported before it left
            return True
        time.sleep(_POLL_S)
    return False


def _stacks_of(p: Position | None) -> str:
    """The stacks of a silent rank of this machine, which a process can give while its interpreter is held."""
    if p is None or p.machine != proc.machine() or not proc.alive(p.pid, p.born):
        return ""
    return f"\n{stacks.stacks_of(p.pid)}".rstrip()
