"""The page says what results.json says, needs nothing else, and a real browser shows it in light and dark."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.commands.compare import folder, page, picture, tables
from tests.commands.comparisons import example, result, results, row

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Table(HTMLParser):
    """The table's rows: (data-key, data-value, text) of each cell; and what the page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.rows: list[list[list[Any]]] = []
        self.open: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {given["id"] or ""} if "id" in given else set()
        self.links += [given[name] or "" for name in ("href", "src", "srcset") if name in given]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and "data-key" in given:
            self.rows[-1].append([given["data-key"], json.loads(given["data-value"] or ""), ""])
        if tag == "th" and given.get("scope") == "col":
            self.headings.append("")
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1][2] += data
        elif "th" in self.open:
            self.headings[-1] += data


def _parsed(found: dict[str, Any]) -> Table:
    return Table(page.html(found, {}))


def test_the_table_of_the_page_is_that_of_the_json() -> None:
    found = json.loads(json.dumps(example()))
    table = _parsed(found)
    columns = tables.columns(found)
    assert table.headings == [column.title for column in columns]
    assert len(table.rows) == len(found["rows"]) + 1
    for cells, r in zip(table.rows[1:], found["rows"], strict=True):
        assert [(key, value) for key, value, _ in cells] == [(column.key, r[column.key]) for column in columns]
        assert [text for _, _, text in cells] == [tables.text(column, r) for column in columns]


def test_each_note_is_where_its_link_leads_and_nothing_comes_from_elsewhere(tmp_path: Path) -> None:
    found = example()
    folder.write(found, tmp_path)
    text = (tmp_path / "report.html").read_text()
    table = Table(text)
    assert {link.removeprefix("#") for link in table.links if link.startswith("#")} == table.ids == {"note-1"}
    assert all(link.startswith(("#", "data:")) for link in table.links)
    assert not re.search(r"https?://|<script|@import|url\(", text)
    assert "&amp; here is &lt;none&gt;" in text


def test_rows_that_can_t_be_compared_raise_an_alarm() -> None:
    rows = [row("ddp x1", {1: result(1.0)}), row("ddp x2", {1: result(1.0, ledger="f" * 64)})]
    assert 'role="alert"' in page.html(results(rows, "ddp x1", 1), {})
    assert 'role="alert"' not in page.html(example(), {})


def test_the_picture_shows_what_was_measured(tmp_path: Path) -> None:
    found = example()
    drawn = picture.lines(found)
    assert {name: [p["x"] for p in points] for name, points in drawn.items()} == {
        "single": [1],
        "ddp": [1, 2, 4],
        "ddp+syncbn": [1, 2, 4],
    }
    assert all(p["low"] <= p["y"] <= p["high"] for points in drawn.values() for p in points)
    names = folder.write(found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    light = np.asarray(Image.open(tmp_path / "speedup.png").convert("L"))
    assert light.shape[1] >= 1200
    assert light[0, 0] == 255
    assert (light < 128).mean() > 0.005  # something is drawn
    for mode in ("light", "dark"):
        assert (picture.draw(found, mode) or b"").startswith(b"\x89PNG")
    assert picture.draw(results([row("dp x1", {}, "why")], "dp x1")) is None


def _browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    return found


def _in_browser(*words: str) -> str:
    command = [_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


@pytest.mark.integration
def test_a_browser_shows_the_page_in_light_and_dark(tmp_path: Path) -> None:
    found = example()
    folder.write(found, tmp_path)
    address = (tmp_path / "report.html").as_uri()
    shots = {}
    for mode, scheme in (("light", 1), ("dark", 0)):
        shot = tmp_path / f"{mode}.png"
        where = f"--user-data-dir={tmp_path / 'profile'}"
        scheme_word = f"--blink-settings=preferredColorScheme={scheme}"
        _in_browser(where, scheme_word, "--window-size=1500,2000", f"--screenshot={shot}", address)
        shots[mode] = np.asarray(Image.open(shot).convert("L")).astype(int)
    # the ground is light in one and dark in the other, in the page and in its picture, and ink stands out from it
    for mode, ground in (("light", 255), ("dark", 22)):
        middle = int(np.median(shots[mode]))
        assert abs(middle - ground) < 12
        for half in np.array_split(shots[mode], 2):
            assert (abs(half - middle) > 100).mean() > 0.003
    table = Table(_in_browser(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address))
    assert [cell[1] for cells in table.rows[1:] for cell in cells] == [
        r[column.key] for r in found["rows"] for column in tables.columns(found)
    ]
