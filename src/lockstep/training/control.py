"""What the ranks agree on between two steps: whether to stop, whether to checkpoint, whether a write has failed."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.config import Interval
from lockstep.distributed.signals import is_held, set_handlers
from lockstep.distributed.world import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SECOND_S = 1.0  # a terminal, a launcher and Slurm may each pass on one and the same signal: within this it counts once
OUT_OF_TIME = -1  # in the place of a signal's number: --max-time is over
RESIZED = -2  # likewise: other processes go on
_REACT_S = 0.2  # how long a request may wait for the ranks to agree on it


@dataclass(frozen=True)
class Agreement:
    """The same on all ranks. `stop` is the number of the signal that asks for it, OUT_OF_TIME, or 0."""

    stop: int = 0
    checkpoint: bool = False
    failed: bool = False
    resize: int = 0  # how many processes shall go on; 0: these


NOTHING, _TO_SAVE = Agreement(), Agreement(checkpoint=True)


class StopRequest:
    """Remembers the first signal; a second one, at least a second later, ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.since = 0.0

    def __call__(self, number: int, frame: object = None) -> None:
        """The signal handler."""
        del frame
        if is_held(number):
            return
        now = time.monotonic()
        if self.signal == 0:
            self.signal, self.since = number, now
        elif now - self.since >= _SECOND_S:
            os._exit(128 + number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Handle SIGTERM, SIGINT and SIGUSR1 within: the loop finds the request at the next step boundary.

    A terminal that closes (SIGHUP) stops nothing.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    handlers: dict[int, Any] = {**dict.fromkeys(STOP_SIGNALS, request), signal.SIGHUP: signal.SIG_IGN}
    handlers = {n: h for n, h in handlers.items() if signal.getsignal(n) != signal.SIG_IGN}  # nohup's wish is respected
    wakeup = signal.set_wakeup_fd(-1)  # who ends the process in time after a signal must not hear of these
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        set_handlers(before)
        signal.set_wakeup_fd(wakeup)


class Control:
    """Brings the ranks to one decision at step boundaries, by a small all-reduce every fifth of a second or so.

    Requests and the clock are local; steps are not: so between two agreements all ranks take the same number of steps,
    which rank 0 sets from its own pace. `deadline`: by rank 0's monotonic clock, when the run's time is over.
    `wish`: rank 0's, asked at each agreement: how many processes shall go on, 0 for these.
    """

    def __init__(
        self, world: World, request: StopRequest, every: Interval, steps_per_epoch: int, deadline: float = math.inf,
        wish: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.request, self.every, self.steps_per_epoch = world, request, every, steps_per_epoch
        self.deadline, self.wish = deadline, wish
        self.next_meeting = 1  # in calls from now
        self.calls = 0
        self.met = self.written = time.monotonic()

    def agree(self, steps: int, failed: bool = False, now: bool = False) -> Agreement:
        """Called by every rank at every step boundary, after `steps` steps.

        `failed`: this rank's last write failed. `now`: decide here, whatever the pace (all ranks must say so).
        """
        self.calls += 1
        by_steps = self.every.unit != "min" and self.every.due(steps, self.steps_per_epoch, 0.0)
        if self.world.size > 1:
            early = self.calls < self.next_meeting
        else:
            early = not (self.request.signal or failed or self.every.unit == "min" or self.deadline < math.inf)
            early = early and (self.wish is None or time.monotonic() - self.met < _REACT_S)
        if early and not now:
            return _TO_SAVE if by_steps else NOTHING
        moment = time.monotonic()
        by_clock = self.every.unit == "min" and self.every.due(steps, self.steps_per_epoch, moment - self.written)
        pace = (moment - self.met) / self.calls
        # between two decisions at an epoch's end no step was taken: they say nothing of the pace
        following = 1 if now else min(1000, max(1, int(_REACT_S / max(pace, 1e-9))))
        by_rank_0 = [0, 0, 0, 0]
        if self.world.rank == 0:
            size = self.wish() if self.wish is not None else 0
            by_rank_0 = [int(by_clock), int(moment >= self.deadline), size, following]
        mine = [self.request.signal, int(failed), *by_rank_0]
        stop, broken, clock, over, size, self.next_meeting = self.world.largest(mine)
        self.met, self.calls = moment, 0
        stop = stop or over * OUT_OF_TIME
        return Agreement(stop, bool(by_steps or clock), bool(broken), 0 if stop or broken else size)

    def saved(self) -> None:
        """A checkpoint was taken: the minutes count from here."""
        self.written = time.monotonic()
