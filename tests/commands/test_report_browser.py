"""The report in a real browser: on a phone and a wide screen, with its script and without, and on paper."""

import html as escaping
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep.commands.report.history import History
from lockstep.commands.report.page import Run, as_data, html, load_runs
from tests.commands import reports

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

# what a frame of the page looks like to its parent, before and after its switches are used
_LOOK = """
window.onload = () => {
  const frame = document.querySelector("iframe"), doc = frame.contentDocument, view = frame.contentWindow;
  const shown = selector => [...doc.querySelectorAll(selector)].filter(e => e.getClientRects().length).length;
  const press = id => { doc.getElementById(id).checked = !doc.getElementById(id).checked; };
  const found = {width: doc.documentElement.clientWidth, needs: doc.documentElement.scrollWidth, alarm: view.alarm};
  found.charts = [shown(".by-step"), shown(".by-epoch"), shown(".by-time")];
  press("along-step"); press("along-time");
  found.by_time = [shown(".by-step"), shown(".by-epoch"), shown(".by-time")];
  found.lines = [shown(".run-0 polyline"), shown(".run-1 polyline")];
  press("show-1");
  found.hidden = [shown(".run-0 polyline"), shown(".run-1 polyline")];
  const chart = doc.querySelector("svg.by-time"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new view.PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 50}));
  found.readout = chart.closest("figure").querySelector(".readout").textContent;
  chart.dispatchEvent(new view.KeyboardEvent("keydown", {key: "ArrowRight"}));
  found.moved = chart.closest("figure").querySelector(".readout").textContent;
  found.tall = doc.documentElement.scrollHeight;
  document.body.dataset.found = JSON.stringify(found);
};
"""


def browser(tmp_path: Path) -> list[str]:
    """The words that start one, without a screen."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    return [found, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]


def _looked_at(tmp_path: Path, text: str, width: int, sandbox: str = "") -> dict[str, Any]:
    frame = (
        f'<iframe width="{width}" height="800" style="border:0" {sandbox} srcdoc="{escaping.escape(text)}"></iframe>'
    )
    harness = tmp_path / "harness.html"
    harness.write_text(f"<!doctype html><body>{frame}<script>{_LOOK}</script></body>", encoding="utf-8")
    words = [*browser(tmp_path), "--dump-dom", "--window-size=1500,1000", harness.as_uri()]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240)
    found = re.search(r'data-found="([^"]*)"', ended.stdout)
    assert found is not None, ended.stderr[-2000:]
    return dict(json.loads(escaping.unescape(found[1])))


def _page() -> str:
    hostile = "</script><script>parent.alarm=window.alarm='ran'</script><img src=x onerror=\"window.alarm='ran'\">"
    records = [*reports.eventful()[:-2], reports.classes(1032.0, 10, ["ant", hostile]), reports.end(1033.0, 10)]
    history = History(Path("x"), records)
    runs = [Run(name, name, history.run.config, history) for name in ("a run of a long name", hostile)]
    return html(runs, as_data(runs))


@pytest.mark.integration
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_any_screen_and_its_switches_work(tmp_path: Path, width: int) -> None:
    found = _looked_at(tmp_path, _page(), width)
    assert found["needs"] <= found["width"] <= width
    steps, epochs, times = found["charts"]
    assert (steps, epochs, times) == (6, 0, 0)
    assert found["by_time"] == [0, 0, 6]
    assert found["lines"][0] == found["lines"][1] > 0
    assert found["hidden"] == [found["lines"][0], 0]
    assert "a run of a long name, training: " in found["readout"]
    assert found["moved"] != found["readout"]
    assert "alarm" not in found, "a class name ran as code"


@pytest.mark.integration
def test_without_its_script_all_is_there_but_the_readout(tmp_path: Path) -> None:
    found = _looked_at(tmp_path, _page(), 1280, 'sandbox="allow-same-origin"')
    assert found["charts"] == [6, 0, 0]
    assert found["by_time"] == [0, 0, 6]
    assert found["hidden"] == [found["lines"][0], 0]
    assert found["readout"] == ""


@pytest.mark.integration
def test_it_prints_light_and_whole(tmp_path: Path) -> None:
    """A PDF of the page by the browser: several sheets, and no part is cut off by a scrolling box."""
    folder = reports.leave(tmp_path / "a", reports.eventful())
    file, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    runs = load_runs([str(folder)])
    file.write_text(html(runs, as_data(runs)), encoding="utf-8")
    words = [*browser(tmp_path), f"--print-to-pdf={printed}", file.as_uri()]
    subprocess.run(words, check=True, timeout=240)
    assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) >= 3
