"""One HTML page that needs nothing else: no network, no font, no picture from elsewhere."""

from collections.abc import Iterable

from lockstep.commands.shared.markup import Markup, joined, tag, trusted

# Okabe and Ito's colours, which people with any colour vision can tell apart, and lighter ones of the same hues
COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B07A00", "#3A9BD9", "#8C6D31", "#6F6F6F"),
    "dark": ("#4FA8E0", "#FF8C42", "#2EC4A0", "#E39AC8", "#F0C05A", "#A5D8F7", "#C9A66B", "#B0B0B0"),
}

# light-dark() takes its first colour or its second by `color-scheme`, which follows the system or the page's own switch
STYLE = """
:root { color-scheme: light dark;
  --ink: light-dark(#1f2328, #e6edf3); --ground: light-dark(#ffffff, #161b22); --soft: light-dark(#57606a, #9da7b3);
  --line: light-dark(#d0d7de, #3d444d); --band: light-dark(#f6f8fa, #1f2630); --alarm: light-dark(#cf222e, #ff7b72); }
:root:has(#theme-light:checked) { color-scheme: light; }
:root:has(#theme-dark:checked) { color-scheme: dark; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 84rem; margin: 0 auto; padding: 1rem 1.5rem 3rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0 0 0.2rem; } h2 { font-size: 1.25rem; margin: 2.4rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.4rem; }
a { color: inherit; }
.scroll { overflow-x: auto; overflow-wrap: normal; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.88rem; }
caption { text-align: left; color: var(--soft); padding-bottom: 0.5rem; }
th, td { padding: 0.3rem 0.6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { vertical-align: bottom; border-bottom: 2px solid var(--soft); }
th:first-child, .words td, .words th { text-align: left; }
tbody th { font-weight: 600; }
tbody tr:nth-child(even) { background: var(--band); }
pre { background: var(--band); border: 1px solid var(--line); border-radius: 6px; padding: 0.6rem 0.8rem;
  overflow-x: auto; margin: 0.3rem 0 1rem; font-size: 0.85rem; white-space: pre-wrap; }
code { font-size: 0.92em; } .soft { color: var(--soft); } .alarm { color: var(--alarm); font-weight: 600; }
summary { cursor: pointer; color: var(--soft); }
:focus-visible { outline: 2px solid light-dark(#0969da, #58a6ff); outline-offset: 2px; }
@media (max-width: 40rem) { body { padding: 0.8rem 0.8rem 2rem; } .words.long { min-width: 48rem; } }
@media print { :root, :root:has(#theme-dark:checked) { color-scheme: light; } body { max-width: none; padding: 0; }
  .controls { display: none; } .scroll { overflow: visible; } * { print-color-adjust: exact; } }
"""


def document(title: str, style: str, body: Iterable[Markup], script: str = "") -> str:
    """The whole page. `style` and `script` are this program's own, and hold nothing of a run."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        trusted(f"<style>{STYLE}{style}</style>"),
    )
    last = trusted(f"<script>{script}</script>") if script else None
    page = tag("html", head, "\n", tag("body", joined(body, "\n"), last), lang="en")
    return f"<!doctype html>\n{page}\n"


def table(
    caption: str, head: Iterable[object], rows: Iterable[Iterable[object]], words: bool = False, label: str = ""
) -> Markup:
    """A table that scrolls by itself; the first cell of a row is its heading. `words`: not numbers, set to the left."""
    body = (
        tag("tr", *(tag("th", cell, scope="row") if not place else tag("td", cell) for place, cell in enumerate(row)))
        for row in rows
    )
    head = list(head)
    kind = "words long" if words and len(head) > 3 else "words" if words else None
    whole = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
        tag("tbody", *body),
        class_=kind,
    )
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=label or caption)
