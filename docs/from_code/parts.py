"""The generated parts by the name that pages give in `generated: NAME`."""

from collections.abc import Callable

from docs.from_code import api, errors, flags, journal

PARTS: dict[str, Callable[[str], str]] = {
    "commands": flags.commands,
    "journal": journal.journal,
    "errors": errors.page,
    "python": api.api,
}
