"""What a person sees of a run: one live line from rank 0, or plain lines now and then where there is no terminal."""

import os
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.errors import shown

_PLAIN_S = 10.0  # between two lines where there is no terminal, at least
_PLAIN_PART = 100  # of the time so far: a run of days writes hundreds of lines, not tens of thousands
_REDRAW_S = 0.1  # to draw the line takes a millisecond or two: many steps of a tiny model
_BAR = 10, 24  # the drawn bar's least and largest width
_HEAVY, _LIGHT = "\N{BOX DRAWINGS HEAVY HORIZONTAL}", "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
_GAP = "  "


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03, 2 d 03:04."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def duration(seconds: float) -> str:
    """8.3 s below a minute; 12:34 min, 1:02:03 h above."""
    return f"{seconds:.1f} s" if seconds < 60 else f"{clock(seconds)} {'min' if seconds < 3600 else 'h'}"


def compose(head: str, fraction: float | None, parts: list[str], width: int) -> str:
    """The line: what goes on, a bar and the percentage of `fraction` (in [0, 1]), and of the parts the first that fit.

    The bar gives way first: at 60 columns the numbers are left.
    """
    line = [head] if fraction is None else [head, f"{fraction:.0%}"]
    for part in parts:
        if len(_GAP.join([*line, part])) > width:
            break
        line.append(part)
    least, largest = _BAR
    room = min(largest, width - len(_GAP.join(line)) - len(_GAP))
    if fraction is not None and room >= least:
        filled = round(fraction * room)
        line.insert(1, _HEAVY * filled + _LIGHT * (room - filled))
    return _GAP.join(line)[:width]


class ProgressBar:
    """What goes on now, images/s, time left, loss, learning rate, data wait. `enabled` is False on all ranks but 0.

    `total_steps`: of the run, of which `done` are behind it; 0: it trains nothing, and leaves no bar on the screen.
    """

    def __init__(self, total_steps: int, epochs: int, enabled: bool, done: int = 0) -> None:
        self.console = Console(highlight=False)
        self.epochs, self.total, self.start = epochs, total_steps, done
        self.enabled, self.live = enabled, enabled and self.console.is_terminal and os.environ.get("TERM") != "dumb"
        self.began = self.written = time.monotonic()
        self.drawn = float("-inf")
        if self.live:
            # no thread beside the training: it is drawn on log steps
            self.line = Live(console=self.console, auto_refresh=False, transient=not total_steps)
            self.line.start()

    def update(
        self, done: int, epoch: int, loss: float, lr: float, images_per_s: float, data_wait: float | None = None
    ) -> None:
        """Show the state after `done` steps; epoch counts from 1, `data_wait` is a fraction of the steps' time."""
        at_once = done >= self.total
        if not self._due(at_once):  # most log steps of a tiny model
            return
        left = (time.monotonic() - self.began) / max(1, done - self.start) * (self.total - done)
        parts = [f"{images_per_s:,.0f} images/s", f"{clock(left)} left", f"loss {loss:.4f}", f"lr {lr:.3g}"]
        if data_wait is not None:
            parts.append(f"data wait {min(1.0, data_wait):.0%}")
        parts.append(f"step {done}/{self.total}")
        self.show(f"epoch {epoch}/{self.epochs}", done / max(1, self.total), parts, at_once)

    def doing(self, what: str) -> None:
        """Say what goes on now, where no number tells how far it is."""
        self.show(what, None, [], at_once=True, plainly=False)

    def counting(self, what: str, images: int, parts: int) -> Callable[[], None]:
        """A function to call before each of `parts` equal parts of work on so many images over all ranks."""
        began, done = time.monotonic(), -1

        def tick() -> None:
            nonlocal done
            done += 1
            seconds, fraction = time.monotonic() - began, min(1.0, done / max(1, parts))
            numbers = []
            if done and seconds > 0:
                numbers = [
                    f"{fraction * images / seconds:,.0f} images/s",
                    f"{clock(seconds / fraction - seconds)} left",
                ]
            self.show(what, fraction, numbers)

        return tick

    def show(
        self, head: str, fraction: float | None, parts: list[str], at_once: bool = False, plainly: bool = True
    ) -> None:
        """The line as `compose` has it. `at_once`: however soon after the last; `plainly`: in a log file too."""
        if not self._due(at_once):
            return
        if self.live:
            self.drawn = time.monotonic()
            line = compose(head, fraction, parts, self.console.width)
            self.line.update(Text(shown(line), no_wrap=True, overflow="crop"), refresh=True)
        elif plainly:
            self.written = time.monotonic()
            self.write(_GAP.join([head, *([] if fraction is None else [f"{fraction:.0%}"]), *parts]))

    def _due(self, at_once: bool) -> bool:
        """Whether it is time to draw the line again, or to write one where there is no terminal."""
        if not self.enabled:
            return False
        now = time.monotonic()
        if self.live:
            return at_once or now - self.drawn >= _REDRAW_S
        return now - self.written >= max(_PLAIN_S, (now - self.began) / _PLAIN_PART)

    def write(self, text: str) -> None:
        """A line above the bar."""
        if self.enabled:
            wrap = not self.console.is_terminal  # a terminal breaks words
            self.console.print(shown(text, keep="\n"), markup=False, soft_wrap=wrap)

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self.live:
            self.line.stop()
