"""Plain values as YAML that a person likes to read, and that any reader of YAML 1.1 or 1.2 reads as these values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Begins as no number does, holds nothing that YAML gives a meaning, and ends in no colon.
_PLAIN = re.compile(r"-{0,2}[A-Za-z/][A-Za-z0-9_./=,@+-]*(:[A-Za-z0-9_./=,@+-]+)*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # of YAML 1.1 for other types


def dump(value: Mapping[str, Any]) -> str:
    """Nested mappings with text keys, lists, texts, whole numbers and truth values as YAML."""
    return "\n".join(_block(value)) + "\n"


def _block(value: Any) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    items = value.items() if isinstance(value, Mapping) else [(None, item) for item in value]
    for key, item in items:
        head = "-" if key is None else f"{_scalar(key)}:"
        if not isinstance(item, Mapping | list) or not item:
            yield f"{head} {_scalar(item)}"
        elif key is None:  # the first line stands beside the hyphen
            yield from (f"{'  ' if i else '- '}{line}" for i, line in enumerate(_block(item)))
        else:
            yield head
            yield from (f"  {line}" for line in _block(item))


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return str(value).lower()  # a number, True, False, {} or []
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return str(value)
    escaped = (f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\U{ord(c):08X}" for c in value)
    return f'"{"".join(escaped)}"'
