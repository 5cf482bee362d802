"""The generated parts by the name that pages give in `generated: NAME`."""

from collections.abc import Callable

from docs.from_code import api, errors, flags

PARTS: dict[str, Callable[[str], str]] = {
    "commands": flags.commands,
    "errors": errors.page,
    "python": api.api,
}
