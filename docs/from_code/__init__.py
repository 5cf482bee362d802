"""Parts of the reference that come from the code: `python -m docs.from_code PART` prints one, `zh` after it in Chinese.

A page of docs/reference/ has a comment `generated: PART` where the site's build puts one. Help texts, messages and
docstrings are the program's and stay in English; headings and table heads are in the page's language.
"""

import re

SPAN = re.compile(r"(`[^`]*`)")
FLAG = re.compile(r"(?<![\w`-])--[a-z][\w-]*")


def escaped(text: str) -> str:
    """A text of the program as Markdown in a table: its code spans stay, its flags become ones."""
    parts = SPAN.split(" ".join(text.split()))
    for number in range(0, len(parts), 2):
        plain = re.sub(r"([\\*_\[\]<>#$])", r"\\\1", parts[number])
        parts[number] = FLAG.sub(lambda flag: f"`{flag[0]}`", plain.replace("\\_", "_"))
    return "".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """A text as a code span of a table."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the cells are Markdown already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
