"""The results as one HTML page that needs nothing else: no network, no script."""

import base64
import json
from collections.abc import Mapping
from html import escape
from string import Template
from typing import Any

from lockstep.commands.compare.tables import Column, columns, explanations, heading, text
from lockstep.commands.shared.page import STYLE

_STYLE = """
body { max-width: 100rem; }
table { font-size: 0.88rem; } th, td { padding: 0.35rem 0.45rem; } td { white-space: nowrap; }
th:first-child { position: sticky; left: 0; background: var(--ground); }
tbody th { white-space: nowrap; }
tbody tr:nth-child(even) th { background: var(--band); }
tr.base th::after { content: " (baseline)"; font-weight: 400; }
.range { display: block; color: var(--soft); font-size: 0.82em; }
.none { color: var(--soft); white-space: normal; }
.alarm { border: 2px solid var(--alarm); padding: 0.6rem 1rem; }
figure { margin: 0; } img { max-width: 100%; height: auto; width: 50rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1.2rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; }
"""
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<main>
<h1>$title</h1>
<p>$heading</p>$alarm
<h2>Results</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Results"><table>
<caption>$caption</caption>
<thead><tr>$head</tr></thead>
<tbody>
$body
</tbody>
</table></div>
$notes
$figure
<h2>Environment</h2>
<dl>$environment</dl>
<details><summary>Config</summary><pre>$config</pre></details>
<h2>To run a row again</h2>
$commands
</main>
</body>
</html>
""")


def html(results: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page. `pictures`: PNGs by mode, light and dark; each cell's `data-value` is its entry in results.json."""
    visible, rows, base = columns(results), results["rows"], ' class="base"'
    caption, *lines = explanations(results)
    notes = "".join(f'<li id="note-{n}">{escape(note)}</li>' for n, note in enumerate(results["notes"], 1))
    alarm = '<p class="alarm" role="alert">The rows can\'t be compared: see the notes.</p>'
    return _PAGE.substitute(
        style=STYLE + _STYLE,
        title=escape(f"lockstep compare {results['config']['recipe']}"),
        heading=escape(heading(results)),
        alarm="" if results["fair"] else alarm,
        caption=escape(caption),
        head="".join(f'<th scope="col">{escape(column.title)}</th>' for column in visible),
        body="\n".join(
            f"<tr{base if row['name'] == results['baseline'] else ''}>{''.join(_entry(c, row) for c in visible)}</tr>"
            for row in rows
        ),
        notes=(f"<ol>{notes}</ol>\n" if notes else "")
        + "\n".join(f"<p>{escape(line)}</p>" for line in lines if not line.startswith("[")),
        figure=_figure(results, pictures) if pictures else "",
        environment="".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in results["environment"].items()
        ),
        config=escape(json.dumps(results["config"], indent=2)),
        commands="\n".join(
            f"<p>{escape(row['name'])}</p><pre>{escape(row['command'])}</pre>" for row in rows if row["command"]
        ),
    )


def _entry(column: Column, row: Mapping[str, Any]) -> str:
    value = row[column.key]
    written = escape(text(column, row))
    kind, inner = "", written
    if value is None:
        kind = ' class="none"'
        if written.startswith("not measured"):
            inner = f'not measured <a href="#note-{row["note"]}">[{row["note"]}]</a>'
    elif column.decimals is not None and " [" in written:
        middle, _, rest = written.partition(" [")
        inner = f'{middle} <span class="range">[{rest}</span>'
    data = escape(json.dumps(value), quote=True)
    if column.key == "name":
        return f'<th scope="row" data-key="{column.key}" data-value="{data}">{inner}</th>'
    return f'<td{kind} data-key="{column.key}" data-value="{data}">{inner}</td>'


def _figure(results: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(pictures[mode]).decode()}" for mode in ("light", "dark"))
    points = [f"{row['name']} {row['speedup']['median']:.2f}" for row in results["rows"] if row["speedup"] is not None]
    alt = escape(f"Speed-up over {results['baseline']}: {', '.join(points)}", quote=True)
    return (
        f'<h2>Speed-up</h2>\n<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{alt}"></picture></figure>'
    )
