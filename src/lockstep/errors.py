"""Errors that a user can act on: what happened, where, and what to do."""

import difflib
import re
from collections.abc import Iterable

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_HANG = 124  # no progress for --hang-timeout, as timeout(1) has it
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C

NOT_ON_WINDOWS = "this runs on Linux; on Windows install and start it inside WSL2 (`wsl --install` sets that up)"


# what a command or a flag was called, or is called elsewhere -> its name here
RENAMED = {"--shards": "--exact", "--timeout": "--collective-timeout"}


class UserError(Exception):
    """Something that the user can put right.

    The command line prints it without a traceback and exits with code 2. `remedy` says what to do.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


def unknown(kind: str, name: str, known: Iterable[str], remedy: str = "") -> UserError:
    """The error for a name that nothing answers to; it offers its other name, or the nearest known ones."""
    names = sorted(known)
    if (new := RENAMED.get(name)) in names:
        return UserError(f"{name} is called {new} here")
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else (f"Known: {', '.join(names)}." if len(names) <= 20 else "")
    return UserError(f"unknown {kind} {name!r}", " ".join(part for part in (hint, remedy) if part))


def reason(error: BaseException) -> str:
    """What somebody's error says, in one line: without colours and addresses, with its type where it says little."""
    line = re.sub(r"\x1b\[[0-9;]*m| ?<_io\.[^>]*>", "", str(error)).strip().partition("\n")[0]
    says = re.search("[A-Za-z]{3}", line) and not isinstance(error, KeyError)
    return line if says else f"{type(error).__name__} {line}".strip()


class PeerError(Exception):
    """This rank stops because another one failed; the other one's message is the one to read."""
