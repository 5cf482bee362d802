"""What a person sees of a run: one live bar from rank 0, or plain lines where there is no terminal."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_SECONDS = 10.0  # between two lines where there is no terminal
_REDRAW_S = 0.1  # to draw the bar takes a millisecond or two: many steps of a tiny model


class ProgressBar:
    """Epoch, step, loss, learning rate, images/s and time left. `enabled` is False on all ranks but 0."""

    def __init__(self, total_steps: int, epochs: int, enabled: bool, done: int = 0) -> None:
        self.console = Console(highlight=False)
        self.epochs, self.total, self.start = epochs, total_steps, done
        self.enabled, self.live = enabled, enabled and self.console.is_terminal
        self.began = self.written = time.monotonic()
        self.drawn = float("-inf")
        if self.live:
            columns = ("[bold]{task.fields[epoch]}", "step {task.completed}/{task.total}", "{task.fields[numbers]}")
            self.bar = Progress(
                *map(TextColumn, columns[:1]),
                BarColumn(bar_width=24),
                *map(TextColumn, columns[1:]),
                TimeRemainingColumn(),
                console=self.console,
                auto_refresh=False,  # no thread beside the training: it is drawn on log steps
            )
            self.task = self.bar.add_task("", total=total_steps, completed=done, epoch="", numbers="")
            self.bar.start()

    def update(self, done: int, epoch: int, loss: float, lr: float, images_per_s: float) -> None:
        """Show the state after `done` steps; epoch counts from 1."""
        if not self.enabled:
            return
        now = time.monotonic()
        if self.live and now - self.drawn < _REDRAW_S and done < self.total:
            return
        numbers = f"loss {loss:.4f}  lr {lr:.3g}  {images_per_s:,.0f} images/s"
        if self.live:
            self.drawn = now
            where = f"epoch {epoch}/{self.epochs}"
            self.bar.update(self.task, completed=done, epoch=where, numbers=numbers, refresh=True)
        elif now - self.written >= _PLAIN_SECONDS:
            self.written = now
            left = (self.written - self.began) / max(1, done - self.start) * (self.total - done)
            self.write(f"epoch {epoch}/{self.epochs}  step {done}/{self.total}  {numbers}  {left:.0f} s left")

    def write(self, text: str) -> None:
        """A line above the bar."""
        if self.enabled:
            self.console.print(text, markup=False, soft_wrap=True)

    def disable(self) -> None:
        """Write no more: the terminal is gone, and writing to it would fail."""
        self.enabled = self.live = False

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self.live:
            self.bar.stop()
