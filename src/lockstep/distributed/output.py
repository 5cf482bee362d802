"""Standard output and error when they break: training goes on without them; a command that makes nothing else fails."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from lockstep.errors import UserError, refusal

_FLUSHED = 8192  # bytes after which a required output is flushed, so that an error comes before the work goes on
_CLEAR = "\r\x1b[K"  # back to the line's start, and the rest of it erased

_broken: list[str] = []
_waiting = False  # for what the terminal's last line says


def take_broken() -> str:
    """Why output was turned off since the last call, for the journal; empty where it was not."""
    reason = "; ".join(_broken)
    _broken.clear()
    return reason


def status(what: str) -> None:
    """Say what is being waited for in the terminal's last line, until anything else is printed; nothing elsewhere."""
    global _waiting
    if not isinstance(sys.stdout, _Stream) or not sys.stdout.isatty() or os.environ.get("TERM") in (None, "dumb"):
        return
    width, _waiting = shutil.get_terminal_size().columns, False
    sys.stdout.write(f"{_CLEAR}{what[: width - 1]}")
    sys.stdout.flush()
    _waiting = True


def for_people(text: str, stream: TextIO | None) -> str:
    """Text whose lines a terminal would break inside words, broken between them, indented alike; elsewhere as it is."""
    if stream is None or not stream.isatty():
        return text
    from rich.console import Console
    from rich.text import Text

    columns, lines = shutil.get_terminal_size().columns, []  # of which a Chinese character takes two
    for paragraph in text.split("\n"):
        indent = paragraph[: len(paragraph) - len(paragraph.lstrip(" "))]
        width = max(1, columns - len(indent))
        parts = Text(paragraph.lstrip(" ")).wrap(Console(width=width), width)
        lines += [f"{indent}{part.plain}".rstrip() for part in parts or [Text()]]
    return "\n".join(lines)


@contextmanager
def unbreakable_output() -> Iterator[None]:
    """Inside, a pipe that nobody reads any more, a full disk or a lost terminal ends no process that prints to it."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Stream(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Stream):
                stream.flush()  # here, and not at the interpreter's end, where an error gets a traceback
        sys.stdout, sys.stderr = before


def with_required_output(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose product is what it prints, inside `unbreakable_output`.
    Raises UserError where standard output can't take all of it, saying how much it took.
    """
    stream = sys.stdout
    if not isinstance(stream, _Stream):
        return fn(*args)
    before, stream.required = stream.required, True
    try:
        value = fn(*args)
        stream.flush()
    finally:
        stream.required = before
    return value


def output_is_required() -> bool:
    """Whether this runs inside `with_required_output`."""
    return isinstance(sys.stdout, _Stream) and sys.stdout.required


class _Stream:
    """A stream whose first error sends it, and the descriptor behind it, to nowhere.

    Where it is `required`, that error is raised as well, by the `write` or `flush` that met it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.required = False
        self._taken = self._unflushed = self._began = 0  # bytes
        with suppress(OSError, ValueError):
            self._began = os.lseek(stream.fileno(), 0, os.SEEK_CUR)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or pretend to."""
        global _waiting
        if _waiting and text and self.isatty():
            _waiting, text = False, _CLEAR + text
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        data = text.encode(encoding, "backslashreplace")  # what the stream has no letters for is shown all the same
        try:
            self._stream.write(data.decode(encoding))
        except (OSError, ValueError) as error:
            self._give_up(error)
        self._unflushed += len(data)
        if self.required and self._unflushed >= _FLUSHED:
            self.flush()
        return len(text)

    def isatty(self) -> bool:
        """Whether a terminal shows what is written."""
        try:
            return self._stream.isatty()
        except ValueError:  # closed
            return False

    def writelines(self, lines: list[str]) -> None:
        """Write, or pretend to."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush, or pretend to."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._give_up(error)
        self._taken, self._unflushed = self._taken + self._unflushed, 0

    def _give_up(self, error: Exception) -> None:
        with suppress(OSError, ValueError):  # a file tells how much of the last write it took
            self._taken = os.lseek(self._stream.fileno(), 0, os.SEEK_CUR) - self._began
        _broken.append(f"{getattr(self._stream, 'name', 'output')}: {refusal(error)}")
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()  # what it still holds
        if self.required:
            raise UserError(
                f"standard output ended: {refusal(error)}; at least {self._taken:,} bytes were written, and the rest "
                "is lost",
                "Free some space there, or send the output elsewhere.",
            ) from error
