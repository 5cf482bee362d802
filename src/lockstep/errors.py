"""Errors that a user can act on: what happened, where, and what to do."""

import difflib
import re
import unicodedata
from collections.abc import Iterable

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_HANG = 124  # no progress for --hang-timeout, as timeout(1) has it
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl-C

NOT_ON_WINDOWS = "this runs on Linux; on Windows install and start it inside WSL2 (`wsl --install` sets that up)"


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


class StoppedBySignal(SystemExit):
    """A signal asked this process to stop; `code` is 128 and its number, as shells have it."""

    code: int


def unknown(kind: str, name: str, known: Iterable[str], remedy: str = "") -> UserError:
    """The error for a name that nothing answers to, with the nearest known ones."""
    names = sorted(known)
    cased = {each.lower(): each for each in reversed(names)}
    meant = {"gpu": "cuda"}.get(name, name).lower()  # another library's word
    near = [cased[each] for each in difflib.get_close_matches(meant, cased, n=3, cutoff=0.5)]
    hint = f"Did you mean {' or '.join(near)}?" if near else (f"Known: {', '.join(names)}." if len(names) <= 30 else "")
    return UserError(f"unknown {kind} {name!r}", " ".join(part for part in (hint, remedy) if part))


def shown(text: str, keep: str = "") -> str:
    """A name or text of a file, a class, a run or a host as a terminal, a log or a page may show it.

    Control characters, which a terminal obeys, and marks that turn the direction of text are escaped, but those in
    `keep`. So are the bytes of a file's name that are not UTF-8: as \\xff. Letters of any script stay.
    """
    return text if text.isprintable() else "".join(c if c in keep else _visible(c) for c in text)


def is_url(text: str) -> bool:
    """Whether a text is an address, as s3://bucket/run, and no path of this machine."""
    return re.match("[A-Za-z][A-Za-z0-9+.:-]*://", text) is not None


def require_no_secrets(url: str, flag: str = "") -> None:
    """Raise UserError, which does not quote it, for an address with a user, a password, a token or a query."""
    scheme, _, rest = url.partition("://")
    user = "@" in rest and (scheme not in ("abfs", "abfss") or ":" in rest)  # Azure's are container@account
    if is_url(url) and (user or set("?#") & set(rest) or "::" in scheme):
        raise UserError(
            f"{flag}{scheme}://... holds a user, a password, a token, a query or a second address, to be written down",
            "Give the address alone, as s3://bucket/run; credentials come from the environment.",
        )


def redacted(text: str) -> str:
    """A text without what may be a secret in its addresses: a user and password before a host, and what follows a ?."""
    bare = re.sub(r"(?<=://)[^\s'\"]*@", "", text)
    return re.sub(r"(://[^\s'\"?#]*)[?#][^\s'\"]+", r"\1?...", bare)


def cell(text: str) -> str:
    """Such a text as a cell of a CSV file: behind a ' where a spreadsheet would take it for a formula."""
    return re.sub(r"^(?=\s*['=+\-@\uff1d\uff0b\uff0d\uff20])", "'", shown(text))


def _visible(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # a byte that is not UTF-8, as Python reads file names
        return f"\\x{ord(char) - 0xDC00:02x}"
    joins = char in "\u200c\u200d"  # in Persian words, and in emoji
    if joins or char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode()


def reason(error: BaseException) -> str:
    """What somebody's error says, in one line: without colours and addresses, with its type where it says little."""
    line = shown(re.sub(r"\x1b\[[0-9;]*m| ?<_io\.[^>]*>", "", str(error)).strip().partition("\n")[0])
    says = re.search("[A-Za-z]{3}", line) and not isinstance(error, KeyError)
    return line if says else f"{type(error).__name__} {line}".strip()


def refusal(error: BaseException) -> str:
    """What the system says, without number and path, for a message that names the path; of other errors `reason`."""
    return getattr(error, "strerror", None) or reason(error)


def with_article(value: object) -> str:
    """A value's type with its article: an int, an ndarray, a str."""
    name = type(value).__name__
    return f"{'an' if re.match('[aeio]|nd', name, re.IGNORECASE) else 'a'} {name}"


class PeerError(Exception):
    """This rank stops because another one failed; the other one's message is the one to read."""
