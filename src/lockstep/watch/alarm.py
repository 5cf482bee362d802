"""What the ranks do once one of them raises an alarm: answer, agree on who reports, tell, and leave."""

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
from lockstep.processes.signals import leave
from lockstep.watch import stacks
from lockstep.watch.hang import Position, Report, report, stranded
from lockstep.watch.journal import HangRecord

REPORT = "hang-report.txt"
_ANSWER_S = 1.5  # what the ranks get to answer
_REPORT_S = 2.0  # what the reporting rank then gets, on a disk that may be the very cause
LONGEST_S = _ANSWER_S + _REPORT_S
_POLL_S = 0.05

OnHang = Callable[[HangRecord], None]


@dataclass
class Board:
    """Where ranks post their positions, in the run's store. Every method may raise RuntimeError: the store is lost."""

    store: Store
    rank: int
    size: int
    peers: dict[int, Position] = field(default_factory=dict)  # the last heartbeats read

    def post(self, what: str, position: Position) -> None:
        """Post this rank's position as "at" (a heartbeat) or "answer"."""
        self.store.set(f"{what}/{self.rank}", position.dump())

    def read(self, what: str, rank: int) -> Position | None:
        """What a rank posted last."""
        return self._read(what, [rank]).get(rank) if self.store.check([f"{what}/{rank}"]) else None

    def read_all(self, what: str) -> dict[int, Position]:
        """What every rank posted last, of those that did."""
        ranks = list(range(self.size))
        if not self.store.check([f"{what}/{rank}" for rank in ranks]):  # one request where all are there
            ranks = [rank for rank in ranks if self.store.check([f"{what}/{rank}"])]
        return self._read(what, ranks)

    def meet(self) -> None:
        """Get to know the ranks that have posted by now, once all have: one small request, none after that."""
        if len(self.peers) < self.size and self.store.check([f"at/{rank}" for rank in range(self.size)]):
            self.read_all("at")

    def _read(self, what: str, ranks: list[int]) -> dict[int, Position]:
        texts = self.store.multi_get([f"{what}/{rank}" for rank in ranks]) if ranks else []
        found = {rank: Position.load(text) for rank, text in zip(ranks, texts, strict=True)}
        if what == "at":
            self.peers.update(found)
        return found

    def raise_alarm(self) -> None:
        """Ask every rank where it is."""
        self.store.set("alarm", str(self.rank))

    @property
    def alarmed(self) -> bool:
        """True once some rank raised an alarm."""
        return self.store.check(["alarm"])


@dataclass(frozen=True)
class Teller:
    """Where a report goes."""

    timeout: float
    folder: Path | None
    on_hang: OnHang | None

    @property
    def file(self) -> str:
        """The file that holds the details; empty where there is no run folder."""
        return str(self.folder / REPORT) if self.folder else ""

    def tell(self, found: Report) -> None:
        """To stderr, to the file and to the callback; what fails is said and does not keep the run from ending."""
        print(f"lockstep: {found.text}", file=sys.stderr, flush=True)
        try:
            if self.file:
                with Path(self.file).open("a", encoding="utf-8") as file:
                    file.write(found.details)
            if self.on_hang is not None:
                self.on_hang(found.record())
        except Exception:
            traceback.print_exc()


def respond(board: Board, teller: Teller, answer: Callable[..., Position], watched: int, quiet_s: float) -> NoReturn:
    """Tell the others where this rank is, hear them, report if no lower rank does, and leave.

    Args:
        answer: this rank's position, with more fields given.
        watched: the rank whose heartbeat this one listened to, silent for `quiet_s` by now.
    """
    try:
        began = time.monotonic()
        seen = {
            str(p.rank): f"its process is {proc.state(p.pid, p.born)}"
            for p in board.read_all("at").values()
            if p.rank != board.rank and p.machine == proc.machine() and p.state != "finished"
        }
        if quiet_s > 1:
            neighbour = seen.get(str(watched), "it is on another machine")
            seen[str(watched)] = f"no heartbeat for {quiet_s:.1f} s; {neighbour}{_stacks(board, watched)}"
        board.post("answer", answer(seen=seen))
        keys = [f"answer/{rank}" for rank in range(board.size)]
        while time.monotonic() - began < _ANSWER_S and not board.store.check(keys):
            time.sleep(_POLL_S)
        lowest = next(rank for rank in range(board.size) if board.store.check([f"answer/{rank}"]))
        if (board.rank == lowest or not _told(board)) and _chosen(board):
            answers = board.read_all("answer")
            teller.tell(report(teller.timeout, board.size, answers, board.read_all("at"), teller.file))
            board.store.set("told", "1")
            time.sleep(4 * _POLL_S)  # this process may hold the store: let the others read that
        else:
            _told(board)
    except RuntimeError as error:
        alone(board, teller, answer(), lost(error))
    for p in board.peers.values():
        # it finds the alarm and leaves too, where a launcher would wait long for it to heed a SIGTERM
        if p.rank != board.rank and p.machine == proc.machine():
            proc.wake(p.pid, p.born)
    leave(EXIT_HANG)


def alone(board: Board, teller: Teller, mine: Position, why: str) -> NoReturn:
    """The store is gone: report what can be seen from this rank, and leave."""
    seen = {
        p.rank: proc.state(p.pid, p.born) if p.machine == mine.machine else f"on another machine, {p.host}"
        for p in board.peers.values()
    }
    teller.tell(stranded(teller.timeout, mine, {r: text for r, text in seen.items() if r != mine.rank}, why))
    leave(EXIT_HANG)


def lost(error: Exception) -> str:
    """Why the store no longer answers, in a line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _chosen(board: Board) -> bool:
    """True for the first rank that asks."""
    me = str(board.rank)
    return bool(board.store.compare_set("reporter", "", me) == me.encode())


def _told(board: Board) -> bool:
    """Wait until the reporting rank has told; False where it did not in time."""
    deadline = time.monotonic() + _REPORT_S / 2
    while time.monotonic() < deadline:
        try:
            if board.store.check(["told"]):
                return True
        except RuntimeError:  # the store went with the rank that held it, which told before it left
            return True
        time.sleep(_POLL_S)
    return False


def _stacks(board: Board, rank: int) -> str:
    """The stacks of a silent rank of this machine, which a process can give while its interpreter is held."""
    p = board.peers.get(rank)
    if p is None or p.machine != proc.machine() or not proc.alive(p.pid, p.born):
        return ""
    return f"\n{stacks.stacks_of(p.pid)}".rstrip()
