"""Heartbeats: every rank posts where it is, and a run that makes no progress ends with a report of who holds it up.

Two daemon threads a rank. One posts heartbeats and looks for an alarm, over a connection of its own to the run's store:
a main thread that is stuck (in a collective, in the loader, in Python) does not stop it. The other only looks at the
clock: it ends the process where the store does not answer either, as when the process that holds it is stopped.
"""

import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from lockstep.distributed import proc
from lockstep.distributed.loader_workers import running
from lockstep.distributed.signals import exit_now
from lockstep.distributed.world import World
from lockstep.errors import EXIT_HANG, reason, shown
from lockstep.monitoring import hang
from lockstep.monitoring.hang import Position
from lockstep.monitoring.journal import FaultRecord

REPORT = "hang-report.txt"
_ANSWER_S = 1.5  # what the ranks get to answer
_REPORT_S = 2.0  # what the reporting rank then gets, on a disk that may be the very cause
_POLL_S = 0.05
_ROUND_S = 0.5  # between two heartbeats, at most
_STORE_STUCK = "it does not answer: the process that holds it (the launcher, or rank 0) is stopped or cut off"
_generations = itertools.count()  # all ranks make their heartbeats in the same order


class Board:
    """Where ranks post their positions, in the run's store. Every method may raise RuntimeError: the store is lost.

    The key "alarm" asks every rank where it is; "reporter" has the rank that reports, "reported" that it has done so.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.peers: dict[int, Position] = {}  # the last heartbeats read

    def post(self, what: str, position: Position) -> None:
        """Post this rank's position as "at" (a heartbeat) or "answer"."""
        self.store.set(f"{what}/{self.rank}", json.dumps(asdict(position)))

    def has(self, what: str, *ranks: int) -> bool:
        """True where these ranks, or all, have posted; one request."""
        return self.store.check([f"{what}/{rank}" for rank in ranks or range(self.size)])

    def read(self, what: str) -> dict[int, Position]:
        """What the ranks posted last, of those that did."""
        ranks = [rank for rank in range(self.size) if self.has(what, rank)]
        texts = self.store.multi_get([f"{what}/{rank}" for rank in ranks]) if ranks else []
        found = {rank: Position(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}
        if what == "at":
            self.peers.update(found)
        return found


class Heartbeat(AbstractContextManager["Heartbeat"]):
    """Watch a run inside `with Heartbeat(...) as beat:`; the main thread notes where it is by `beat.at(step, phase)`.

    Where a rank's main thread neither calls `at` nor enters a collective for `hang_timeout` seconds (0: no limit), one
    report goes to stderr and to hang-report.txt in the run folder, and every rank exits with EXIT_HANG. It names the
    ranks that the others wait for. Time in which the watching process was suspended itself does not count.

    `store`: what `run_store(world)` returned. `folder`: the run folder, where this rank has one. `on_hang`: called with
    the journal's `fault` record on the rank that reports, beside its stuck main thread; it has two seconds.
    """

    def __init__(
        self, world: World, store: Store | None, hang_timeout: float, folder: Path | None = None,
        on_hang: Callable[[FaultRecord], None] | None = None,
    ) -> None:  # fmt: skip
        self._place = (0, "start")  # step, phase
        self._long_phases: list[float] = []  # until when those that are open may last
        self._threads: list[threading.Thread] = []
        self._timeout, self._interval = hang_timeout, min(_ROUND_S, hang_timeout / 10)
        self._file, self._on_hang = folder / REPORT if folder else None, on_hang
        generation = next(_generations)
        if not hang_timeout:
            return
        prefixed = PrefixStore(f"lockstep/heartbeat/{generation}", store or HashStore())
        self._board = Board(prefixed, world.rank, world.size)
        self._backends = _backends(world)
        self._stalled_s = 0.0  # that the main thread has not moved
        self._beats, self._beat_at, self._lost = 0, time.monotonic(), ""  # posted to the store; why that ended
        self._alarmed_at = 0.0
        self._ended = threading.Event()
        self._identity: dict[str, Any] = {"rank": world.rank, "host": socket.gethostname(), "machine": proc.machine()}
        self._identity |= {"pid": os.getpid(), "born": proc.born(os.getpid())}
        self._board.post("at", self._position())
        for target in (self._exchange_beats, self._watch_clock):
            thread = threading.Thread(target=target, name=f"lockstep{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, step: int, phase: str) -> None:
        """The main thread has come to this step and phase. Each call counts as progress, and is but one assignment."""
        self._place = (step, phase)

    @contextmanager
    def long_phase(self, phase: str, longest: float = 3600.0) -> Iterator[None]:
        """Inside, something may go on for `longest` seconds without a call of `at` (a download, a compilation)."""
        step, before = self._place
        self._long_phases.append(time.monotonic() + longest)
        self._place = (step, phase)
        try:
            yield
        finally:
            self._place = (self._place[0], before)
            self._long_phases.pop()

    def close(self) -> None:
        """Stop watching: this rank has finished, and the others no longer expect its heartbeats."""
        if not self._threads:
            return
        self._ended.set()
        for thread in self._threads:
            thread.join(2.0)  # a round takes a millisecond, unless the store is stuck
        self._threads, self._backends = [], []

    def _position(self, **more: Any) -> Position:
        step, phase = self._place
        return Position(
            step=step,
            phase=phase,
            stalled_s=round(self._stalled_s, 1),
            collectives=self._collectives(),
            state="finished" if self._ended.is_set() else "long phase" if self._in_long_phase() else "running",
            beats=self._beats,
            **self._identity,
            **more,
        )

    def _answer(self) -> Position:
        """This rank's position with all that costs time to find out."""
        kind, where = hang.activity(hang.frames_of(threading.main_thread().ident), self._place[1])
        seen = {str(p.rank): f"its process is {proc.state(p.pid, p.born)}" for p in self._neighbours()}
        workers = [f"{name} (pid {pid}) is {proc.state(pid)}" for name, pid in running()]
        return self._position(kind=kind, where=where, stacks=hang.own_stacks(), workers=workers, seen=seen)

    def _in_long_phase(self) -> bool:
        return time.monotonic() < max([*self._long_phases, 0.0])

    def _collectives(self) -> int | None:
        """Collectives that this rank has entered, as the backends themselves count them."""
        try:
            return sum(int(backend._get_sequence_number_for_group()) for backend in self._backends)
        except RuntimeError:  # a backend that does not count, or that is shut down
            return None

    def _watch_clock(self) -> None:
        """The thread that looks at the clock."""
        before, looked = (self._place, self._collectives()), time.monotonic()
        longest = max(1.0, 4 * self._interval)  # between two looks: who was suspended itself accuses nobody
        while not self._ended.wait(self._interval):
            here, now = (self._place, self._collectives()), time.monotonic()
            # a new tuple from each call of `at`, whatever its values
            moved = here[0] is not before[0] or here[1] != before[1] or self._in_long_phase()
            self._stalled_s = 0.0 if moved else self._stalled_s + min(now - looked, longest)
            before, looked = here, now
            if self._alarmed_at:
                if now - self._alarmed_at > _ANSWER_S + _REPORT_S + 2 * self._interval:
                    os._exit(EXIT_HANG)  # whatever the report is stuck in
            elif self._stalled_s >= self._timeout and (self._lost or now - self._beat_at >= self._timeout / 2):
                self._alarmed_at = now
                why = (self._lost or _STORE_STUCK,)  # reported by another thread: this one keeps to the clock
                threading.Thread(target=self._report_alone, args=why, daemon=True).start()

    def _exchange_beats(self) -> None:
        """The thread that posts this rank's position, answers an alarm, and raises one where this rank is stuck."""
        board = self._board
        try:
            while not self._ended.wait(self._interval):
                board.post("at", self._position())
                self._beats, self._beat_at = self._beats + 1, time.monotonic()
                if len(board.peers) < board.size and board.has("at"):
                    board.read("at")  # once: where the store is lost, this is known of the others
                if board.store.check(["alarm"]):
                    self._alarmed_at = time.monotonic()
                    self._respond()
                if self._stalled_s >= self._timeout and not self._excused():
                    board.store.set("alarm", "")
            board.post("at", self._position())
        except RuntimeError as error:  # torch's errors of a store: its process has ended, or is about to
            self._lost = reason(error)

    def _excused(self) -> bool:
        """True, and the clock starts again, where the long phase of a rank that lives may keep this one waiting."""
        before = {rank: p.beats for rank, p in self._board.peers.items()}  # a timeout ago: who lives has posted since
        long = [p for p in self._board.read("at").values() if p.state == "long phase"]
        if excused := any(p.beats > before.get(p.rank, -1) for p in long):
            self._stalled_s = 0.0
        return excused

    def _neighbours(self) -> list[Position]:
        """The other ranks of this machine, as they were when last heard of."""
        here, peers = self._identity["machine"], self._board.peers.values()
        return [p for p in peers if p.rank != self._board.rank and p.machine == here and p.state != "finished"]

    def _respond(self) -> NoReturn:
        """Post where this rank is, wait for the others' answers, report if no lower rank does, and end this process."""
        board, me = self._board, str(self._board.rank)
        try:
            began = time.monotonic()
            board.read("at")
            board.post("answer", self._answer())
            while time.monotonic() - began < _ANSWER_S and not board.has("answer"):
                time.sleep(_POLL_S)
            lowest = next(rank for rank in range(board.size) if board.has("answer", rank))
            may_report = board.rank == lowest or not self._wait_for_report()
            if may_report and board.store.compare_set("reporter", "", me) == me.encode():  # the first rank that asks
                answers = board.read("answer")
                self._write(*hang.report(self._timeout, board.size, answers, board.read("at"), str(self._file or "")))
                board.store.set("reported", "1")
                time.sleep(4 * _POLL_S)  # this process may hold the store: let the others read that
            else:
                self._wait_for_report()
        except RuntimeError as error:
            self._report_alone(reason(error))
        for p in self._neighbours():
            # it finds the alarm and leaves too, where a launcher would wait long for it to heed a SIGTERM
            proc.wake(p.pid, p.born)
        exit_now(EXIT_HANG)

    def _wait_for_report(self) -> bool:
        """Wait until the reporting rank has reported; False where it did not in time."""
        deadline = time.monotonic() + _REPORT_S / 2
        while time.monotonic() < deadline:
            try:
                if self._board.store.check(["reported"]):
                    return True
            except RuntimeError:  # the store went with the rank that held it, which reported before it left
                return True
            time.sleep(_POLL_S)
        return False

    def _report_alone(self, why: str) -> NoReturn:
        """The store is lost: report what can be seen from this rank, and end this process."""
        mine, board, file = self._answer(), self._board, str(self._file or "")
        self._write(*hang.report(self._timeout, board.size, {mine.rank: mine}, board.peers, file, lost=why))
        exit_now(EXIT_HANG)

    def _write(self, record: FaultRecord, text: str, details: str) -> None:
        """To stderr, to the file and to `on_hang`; what fails is printed and does not keep the run from ending."""
        print("lockstep:", shown(text, keep="\n"), file=sys.stderr, flush=True)
        try:
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(details)
            if self._on_hang is not None:
                self._on_hang(record)
        except Exception:
            traceback.print_exc()


def run_store(world: World) -> Store | None:
    """A connection of its own to the store through which the run's ranks met; None in a world of one."""
    return dist.distributed_c10d._get_default_store().clone() if world.size > 1 else None


def _backends(world: World) -> list[Any]:
    if world.size == 1 or (group := dist.group.WORLD) is None:
        return []
    # gloo alone serves every kind of device, and counts once
    return list(dict.fromkeys(group._get_backend(device) for device in group._device_types))
