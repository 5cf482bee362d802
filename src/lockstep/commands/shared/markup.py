"""HTML and SVG that can't be broken out of: whatever is not markup already is escaped as it is put in."""

import json
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_VOID = frozenset(("meta", "link", "img", "input", "br", "source"))
# control characters, halves of pairs, what turns the direction of the text after it, and what is no character
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
# what JSON may hold and an HTML parser, or JavaScript's, would take for something of its own
_IN_SCRIPT = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


class Markup(str):
    """Text that is HTML already; `tag`, `joined` and `trusted` make it, and nothing else should."""

    __slots__ = ()


def trusted(text: str) -> Markup:
    """A text of this program's own as markup. Never for what came from a file or a user."""
    return Markup(text)


def tag(name: str, /, *inside: Any, **attributes: Any) -> Markup:
    """An element. `inside`: markup as it is, anything else as text, None for nothing.

    `attributes`: True alone, None and False not at all; `class_` is class, `aria_label` aria-label.
    """
    given = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{given}>" + ("" if name in _VOID else f"{joined(inside)}</{name}>"))


def joined(parts: Iterable[Any], between: str = "") -> Markup:
    """Parts as `tag` takes them, one after the other."""
    return Markup(
        escape(between).join(
            part if isinstance(part, Markup) else escape(_text(part), quote=False) for part in parts if part is not None
        )
    )


def embedded_json(values: Mapping[str, Any], name: str) -> Markup:
    """Values as a data block of a page, `JSON.parse(document.getElementById(name).textContent)`."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair, of a file name, is \udcff there
    return Markup(f'<script type="application/json" id="{escape(name)}">{text.translate(_IN_SCRIPT)}</script>')


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def _text(value: Any) -> str:
    """As text, without what a page has no place for."""
    return _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", f"{value:g}" if isinstance(value, float) else str(value))
