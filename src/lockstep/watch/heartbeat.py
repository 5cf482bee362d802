"""The watch against hangs: every rank tells the others where it is, and a run that stands still ends with a report.

Two daemon threads a rank. The one tells and listens, over a connection of its own to the run's store, so a main thread
stuck anywhere (in a collective, in the loader, in Python) does not silence it; a stopped process does, and that is
noticed too. The other only looks at the clock: it ends the process where the store does not answer either, as when the
process that holds the store is the one that is stopped.
"""

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from lockstep.errors import EXIT_HANG
from lockstep.processes import proc
from lockstep.processes.world import World
from lockstep.watch import stacks
from lockstep.watch.alarm import LONGEST_S, Board, OnHang, Teller, alone, lost, respond
from lockstep.watch.hang import Position, activity

_ROUND_S = 0.5  # between two heartbeats, at most
_STORE_STUCK = "it does not answer: the process that holds it (the launcher, or rank 0) is stopped or cut off"
_generations = itertools.count()  # all ranks make their watches in the same order


class Heartbeat:
    """Watch a run inside `with Heartbeat(...) as beat:`; the main thread says where it is by `beat.at(step, phase)`.

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
        self._position = (0, "start")
        self._pauses: list[float] = []  # until when those that are open may last
        self._threads: list[threading.Thread] = []
        self._timeout, self._interval = hang_timeout, min(_ROUND_S, hang_timeout / 10)
        generation = next(_generations)
        if not hang_timeout:
            return
        prefixed = PrefixStore(f"lockstep/heartbeat/{generation}", store or HashStore())
        self._board = Board(prefixed, world.rank, world.size)
        self._teller = Teller(hang_timeout, folder, on_hang)
        self._backends = _backends(world)
        self._still = Clock(self._interval)  # how long the main thread has not moved
        self._rounds, self._lost = 0, ""  # of talking with the store; why that ended
        self._alarmed_at = 0.0
        self._ended = threading.Event()
        self._identity: dict[str, Any] = {
            "rank": world.rank,
            "host": socket.gethostname(),
            "machine": proc.machine(),
            "pid": os.getpid(),
            "born": proc.born(os.getpid()),
        }
        stacks.answer_for_stacks()
        self._board.post("at", self._here())
        for target in (self._talk, self._guard):
            thread = threading.Thread(target=target, name=f"lockstep{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def at(self, step: int, phase: str) -> None:
        """The main thread has come to this step and phase ("loader", "forward-backward", "evaluation"...).

        Each call counts as progress, also one that says the same again. It is one assignment: no lock, no system call.
        """
        self._position = (step, phase)

    @contextmanager
    def pause(self, phase: str, longest: float = 3600.0) -> Iterator[None]:
        """Inside, something long goes on without news (a download, a compilation), for `longest` seconds at most.

        Meanwhile no rank's standing still counts; a process that is stopped does.
        """
        step, before = self._position
        self._pauses.append(time.monotonic() + longest)
        self._position = (step, phase)
        try:
            yield
        finally:
            self._position = (self._position[0], before)
            self._pauses.pop()

    def close(self) -> None:
        """Stop watching: this rank has finished, and the others no longer expect to hear of it."""
        if not self._threads:
            return
        self._ended.set()
        for thread in self._threads:
            thread.join(2.0)  # a round takes a millisecond, unless the store is stuck
        self._threads, self._backends = [], []

    def _here(self, **more: Any) -> Position:
        step, phase = self._position
        return Position(
            step=step,
            phase=phase,
            still_s=round(self._still.quiet_s, 1),
            collectives=self._collectives(),
            state="finished" if self._ended.is_set() else "paused" if self._paused() else "running",
            beat=self._rounds,
            **self._identity,
            **more,
        )

    def _answer(self, **more: Any) -> Position:
        """This rank's position with all that costs time to find out."""
        main = stacks.main_thread()
        kind, where = activity(stacks.frames(main), self._position[1])
        return self._here(kind=kind, where=where, stacks=stacks.own_stacks(main), notes=stacks.children(), **more)

    def _paused(self) -> bool:
        return bool(self._pauses) and time.monotonic() < max([*self._pauses, 0.0])

    def _collectives(self) -> int | None:
        """Collectives that this rank has entered, as the backends themselves count them."""
        try:
            return sum(int(backend._get_sequence_number_for_group()) for backend in self._backends)
        except RuntimeError:  # a backend that does not count, or that is shut down
            return None

    def _guard(self) -> None:
        """The thread that looks at the clock."""
        deaf, rounds = Clock(self._interval), -1
        position, collectives = self._position, self._collectives()
        while not self._ended.wait(self._interval):
            now = self._position, self._collectives()
            # a new tuple from each call of `at`, whatever it says
            self._still.look(now[0] is position and now[1] == collectives and not self._paused())
            position, collectives = now
            deaf.look(self._rounds == rounds)
            rounds = self._rounds
            if self._alarmed_at:
                if time.monotonic() - self._alarmed_at > LONGEST_S + 2 * self._interval:
                    os._exit(EXIT_HANG)  # whatever the report is stuck in
            elif self._still.quiet_s >= self._timeout and (self._lost or deaf.quiet_s >= self._timeout / 2):
                self._alarmed_at = time.monotonic()
                threading.Thread(target=self._report_alone, daemon=True).start()  # this one keeps to the clock

    def _report_alone(self) -> None:
        alone(self._board, self._teller, self._answer(), self._lost or _STORE_STUCK)

    def _talk(self) -> None:
        """The thread that tells the others where this rank is, and listens to the next rank that has not finished."""
        me, size, board = self._board.rank, self._board.size, self._board
        watched, heard, heartbeat = (me + 1) % size, Clock(self._interval), -1
        try:
            while not self._ended.wait(self._interval):
                board.post("at", self._here())
                self._rounds += 1
                board.meet()
                if board.alarmed:
                    self._alarmed_at = time.monotonic()
                    respond(board, self._teller, self._answer, watched, heard.quiet_s)
                if watched != me:
                    last = board.read("at", watched)
                    if last is not None and last.state == "finished":
                        watched, heard = (watched + 1) % size, Clock(self._interval)
                    else:
                        number = last.beat if last is not None else -1
                        heard.look(number == heartbeat)
                        heartbeat = number
                if heard.quiet_s >= self._timeout or (self._still.quiet_s >= self._timeout and not self._excused()):
                    board.raise_alarm()
            board.post("at", self._here())
        except RuntimeError as error:  # torch's errors of a store: what held it has ended, or is about to
            self._lost = lost(error)

    def _excused(self) -> bool:
        """True, and the clock starts anew, where a rank that announced something long keeps this one waiting."""
        excused = any(p.state == "paused" for p in self._board.read_all("at").values())
        if excused:
            self._still.restart()
        return excused


class Clock:
    """How long something has stayed the same, in time in which this thread could look.

    A process that was suspended itself, with the whole job or the laptop, thus accuses nobody when it comes back.
    """

    def __init__(self, interval: float) -> None:
        self._longest = max(1.0, 4 * interval)  # that may pass between two looks and still count
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self.quiet_s, self._last = 0.0, time.monotonic()

    def look(self, same: bool) -> None:
        """Note whether it is still the same; `quiet_s` is for how long."""
        now = time.monotonic()
        self.quiet_s = self.quiet_s + min(now - self._last, self._longest) if same else 0.0
        self._last = now


def run_store(world: World) -> Store | None:
    """A connection of its own to the store through which the run's ranks met; None in a world of one."""
    return dist.distributed_c10d._get_default_store().clone() if world.size > 1 else None


def _backends(world: World) -> list[Any]:
    if world.size == 1:
        return []
    group = dist.distributed_c10d._get_default_group()
    # gloo alone serves every kind of device, and counts once
    return list(dict.fromkeys(group._get_backend(device) for device in group._device_types))
