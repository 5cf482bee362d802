"""The watch against hangs: every rank posts where it is, and a run that makes no progress ends with a report.

Two daemon threads a rank. The one posts heartbeats and reads those of another rank, over a connection of its own to the
run's store, so a main thread stuck anywhere (in a collective, in the loader, in Python) does not stop it; a stopped
process does, and that is noticed too. The other only looks at the clock: it ends the process where the store does not
answer either, as when the process that holds the store is the one that is stopped.
"""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store

from lockstep.errors import EXIT_HANG
from lockstep.processes import proc
from lockstep.processes.world import World
from lockstep.watch import stacks
from lockstep.watch.alarm import LONGEST_S, REPORT, Board, OnHang, Reporter, report_alone, respond, store_error
from lockstep.watch.hang import Position, activity

_ROUND_S = 0.5  # between two heartbeats, at most
_STORE_STUCK = "it does not answer: the process that holds it (the launcher, or rank 0) is stopped or cut off"
_generations = itertools.count()  # all ranks make their watches in the same order


class Heartbeat(AbstractContextManager["Heartbeat"]):
    """Watch a run inside `with Heartbeat(...) as beat:`; the main thread notes where it is by `beat.at(step, phase)`.

    Where a rank's main thread neither calls `at` nor enters a collective for `hang_timeout` seconds, or its process is
    silent for that long, one report goes to stderr and to hang-report.txt in the run folder, and every rank exits with
    EXIT_HANG. Time in which the watching process was suspended itself does not count.

    Args:
        world: the ranks. In a world of one the loader and the user's code are watched alike.
        store: what `run_store(world)` returned.
        hang_timeout: seconds; 0 watches nothing.
        folder: the run folder, where this rank has one.
        on_hang: called with the journal's `fault` record on the rank that reports: the lowest that is still alive.
            It runs in a thread beside the stuck main thread, and must be done in two seconds.
    """

    def __init__(
        self,
        world: World,
        store: Store | None,
        hang_timeout: float,
        folder: Path | None = None,
        on_hang: OnHang | None = None,
    ) -> None:
        self._place = (0, "start")  # step, phase
        self._long_phases: list[float] = []  # until when those that are open may last
        self._threads: list[threading.Thread] = []
        self._timeout, self._interval = hang_timeout, min(_ROUND_S, hang_timeout / 10)
        generation = next(_generations)
        if not hang_timeout:
            return
        prefixed = PrefixStore(f"lockstep/heartbeat/{generation}", store or HashStore())
        self._board = Board(prefixed, world.rank, world.size)
        self._reporter = Reporter(hang_timeout, folder / REPORT if folder else None, on_hang)
        self._backends = _backends(world)
        self._stalled = Clock(self._interval)  # how long the main thread has not moved
        self._beats, self._lost = 0, ""  # posted to the store; why that ended
        self._alarmed_at = 0.0
        self._ended = threading.Event()
        self._identity: dict[str, Any] = {
            "rank": world.rank,
            "host": socket.gethostname(),
            "machine": proc.machine(),
            "pid": os.getpid(),
            "born": proc.born(os.getpid()),
        }
        stacks.dump_on_signal()
        self._board.post("at", self._position())
        for target in (self._exchange_beats, self._watch_clock):
            thread = threading.Thread(target=target, name=f"lockstep{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def __exit__(self, *_: object) -> None:
        self.close()

    def at(self, step: int, phase: str) -> None:
        """The main thread has come to this step and phase ("loader", "forward-backward", "evaluation"...).

        Each call counts as progress, also one with the same values. It is one assignment: no lock, no system call.
        """
        self._place = (step, phase)

    @contextmanager
    def long_phase(self, phase: str, longest: float = 3600.0) -> Iterator[None]:
        """Inside, something may go on for `longest` seconds without a call of `at` (a download, a compilation).

        Meanwhile no rank counts as hanging; a process that is stopped does.
        """
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
            stalled_s=round(self._stalled.seconds, 1),
            collectives=self._collectives(),
            state="finished" if self._ended.is_set() else "long phase" if self._in_long_phase() else "running",
            beats=self._beats,
            **self._identity,
            **more,
        )

    def _answer(self, **more: Any) -> Position:
        """This rank's position with all that costs time to find out."""
        kind, where = activity(stacks.main_frames(), self._place[1])
        workers = stacks.loader_workers()
        return self._position(kind=kind, where=where, stacks=stacks.own_stacks(), workers=workers, **more)

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
        store_stuck, beats = Clock(self._interval), -1
        place, collectives = self._place, self._collectives()
        while not self._ended.wait(self._interval):
            now = self._place, self._collectives()
            # a new tuple from each call of `at`, whatever its values
            self._stalled.update(now[0] is place and now[1] == collectives and not self._in_long_phase())
            place, collectives = now
            store_stuck.update(self._beats == beats)
            beats = self._beats
            if self._alarmed_at:
                if time.monotonic() - self._alarmed_at > LONGEST_S + 2 * self._interval:
                    os._exit(EXIT_HANG)  # whatever the report is stuck in
            elif self._stalled.seconds >= self._timeout and (self._lost or store_stuck.seconds >= self._timeout / 2):
                self._alarmed_at = time.monotonic()
                alone = (self._board, self._reporter, self._answer, self._lost or _STORE_STUCK)
                threading.Thread(target=report_alone, args=alone, daemon=True).start()  # this one keeps to the clock

    def _exchange_beats(self) -> None:
        """The thread that posts this rank's position, and follows the next rank that has not finished."""
        me, size, board = self._board.rank, self._board.size, self._board
        watched, silent, beats = (me + 1) % size, Clock(self._interval), -1
        try:
            while not self._ended.wait(self._interval):
                board.post("at", self._position())
                self._beats += 1
                if len(board.peers) < size and board.has("at"):
                    board.read("at")  # once: where the store is lost, this is known of the others
                if board.store.check(["alarm"]):
                    self._alarmed_at = time.monotonic()
                    respond(board, self._reporter, self._answer, watched, silent.seconds)
                if watched != me:
                    last = board.read("at", watched).get(watched)
                    if last is not None and last.state == "finished":
                        watched, silent = (watched + 1) % size, Clock(self._interval)
                    else:
                        number = last.beats if last is not None else -1
                        silent.update(number == beats)
                        beats = number
                if silent.seconds >= self._timeout or (self._stalled.seconds >= self._timeout and not self._excused()):
                    board.store.set("alarm", str(me))
            board.post("at", self._position())
        except RuntimeError as error:  # torch's errors of a store: what held it has ended, or is about to
            self._lost = store_error(error)

    def _excused(self) -> bool:
        """True, and the clock starts anew, where some rank's long phase may be what keeps this one waiting."""
        excused = any(p.state == "long phase" for p in self._board.read("at").values())
        if excused:
            self._stalled.restart()
        return excused


class Clock:
    """For how many `seconds` something has been the same, counting only time in which this thread could look.

    A process that was suspended itself, with the whole job or the laptop, thus accuses nobody when it comes back.
    """

    def __init__(self, interval: float) -> None:
        self._longest = max(1.0, 4 * interval)  # that may pass between two updates and still count
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self.seconds, self._last = 0.0, time.monotonic()

    def update(self, same: bool) -> None:
        """Note whether it is still the same."""
        now = time.monotonic()
        self.seconds = self.seconds + min(now - self._last, self._longest) if same else 0.0
        self._last = now


def run_store(world: World) -> Store | None:
    """A connection of its own to the store through which the run's ranks met; None in a world of one."""
    return dist.distributed_c10d._get_default_store().clone() if world.size > 1 else None


def _backends(world: World) -> list[Any]:
    group = dist.group.WORLD if world.size > 1 else None
    if group is None:
        return []
    # gloo alone serves every kind of device, and counts once
    return list(dict.fromkeys(group._get_backend(device) for device in group._device_types))
