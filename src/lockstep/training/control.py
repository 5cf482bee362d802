"""What the ranks agree on between two steps: whether to stop, whether to checkpoint, whether a write has failed."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lockstep.errors import UserError
from lockstep.world import World

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_SECOND_S = 1.0  # a terminal, a launcher and Slurm may each pass on one and the same signal: within this it counts once
_REACT_S = 0.2  # how long a request may wait for the ranks to agree on it


@dataclass(frozen=True)
class Agreement:
    """The same on all ranks. `stop` is the number of the signal that asks for it, or 0."""

    stop: int = 0
    checkpoint: bool = False
    failed: bool = False


class StopRequest:
    """Remembers the first signal; a second one, at least a second later, ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0
        self.since = 0.0

    def __call__(self, number: int, frame: object = None) -> None:
        """The signal handler."""
        del frame
        now = time.monotonic()
        if self.signal == 0:
            self.signal, self.since = number, now
        elif now - self.since >= _SECOND_S:
            os._exit(128 + number)


def terminal_is_gone() -> bool:
    """True where nobody can come back to this process's terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return True
    return False


@contextmanager
def stop_requests(on_hangup: str, silence: Callable[[], None]) -> Iterator[StopRequest]:
    """Handle SIGTERM, SIGINT, SIGUSR1 and SIGHUP within: the loop finds the request at the next step boundary.

    Args:
        on_hangup: "continue", "stop", or "auto": continue where the terminal is gone for good.
        silence: called where the run goes on without its terminal.
    """
    request = StopRequest()

    def hung_up(number: int, frame: object) -> None:
        if on_hangup == "continue" or (on_hangup == "auto" and terminal_is_gone()):
            silence()
        else:
            request(number, frame)

    handlers = {number: request for number in STOP_SIGNALS} | {signal.SIGHUP: hung_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Interval:
    """How often to checkpoint: after so many steps, epochs or minutes; 0 never."""

    count: float
    unit: str  # "steps", "epoch" or "min"

    @classmethod
    def parse(cls, text: str) -> "Interval":
        """From `500steps`, `1epoch`, `10min` or `0`."""
        if text.strip() in ("0", "never"):
            return cls(0, "steps")
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(step|epoch|min)(?:s|utes?)?\s*", text)
        count = float(found[1]) if found else 0.0
        if found is None or count <= 0 or (found[2] != "min" and count != int(count)):
            raise UserError(
                f"--checkpoint-every {text}: not a number of steps, epochs or minutes",
                "Write it as 500steps, 1epoch, 10min, or 0 for none.",
            )
        return cls(count, {"step": "steps"}.get(found[2], found[2]))

    def due(self, steps: int, steps_per_epoch: int, seconds: float) -> bool:
        """True where a checkpoint is due after `steps`, `seconds` after the last one (by rank 0's monotonic clock)."""
        if self.count == 0:
            return False
        if self.unit == "min":
            return seconds >= self.count * 60
        return steps % int(self.count if self.unit == "steps" else self.count * steps_per_epoch) == 0


class Control:
    """Brings the ranks to one decision at step boundaries, by a small all-reduce every fifth of a second or so.

    Requests and the clock are local; steps are not: so between two agreements all ranks take the same number of steps, which
    rank 0 sets from its own pace.
    """

    def __init__(self, world: World, request: StopRequest, every: Interval, steps_per_epoch: int) -> None:
        self.world, self.request, self.every, self.steps_per_epoch = world, request, every, steps_per_epoch
        self.next_meeting = 1  # in calls from now
        self.calls = 0
        self.met = self.written = time.monotonic()

    def agree(self, steps: int, failed: bool = False) -> Agreement:
        """Called by every rank at every step boundary, after `steps` steps. `failed`: this rank's last write failed."""
        self.calls += 1
        by_steps = self.every.unit != "min" and self.every.due(steps, self.steps_per_epoch, 0.0)
        if self.calls < self.next_meeting:
            return Agreement(checkpoint=by_steps)
        now = time.monotonic()
        by_clock = self.every.unit == "min" and self.every.due(steps, self.steps_per_epoch, now - self.written)
        pace = (now - self.met) / self.calls
        wish = min(1000, max(1, int(_REACT_S / max(pace, 1e-9))))
        if self.world.size == 1:
            stop, clock, broken, self.next_meeting = self.request.signal, by_clock, failed, 1
        else:
            mine = [self.request.signal, failed, *((by_clock, wish) if self.world.rank == 0 else (0, 0))]
            stop, broken, clock, self.next_meeting = self.world.largest(mine)
        self.met, self.calls = now, 0
        return Agreement(int(stop), bool(by_steps or clock), bool(broken))

    def saved(self) -> None:
        """A checkpoint was taken: the minutes count from here."""
        self.written = time.monotonic()
