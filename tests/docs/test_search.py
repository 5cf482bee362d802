"""The site's search in Chinese finds any run of characters, in a real browser."""

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("sphinx")
from docs.chinese_search import SearchPairs

from tests.commands.test_report_browser import browser

ROOT = Path(__file__).parents[2]
CONF = """
import sys
sys.path.insert(0, {root!r})
from docs.chinese_search import SearchPairs
html_search_language = language = "zh"
html_show_search_summary = False  # which a page opened from a file may not fetch

def setup(app):
    app.add_search_language(SearchPairs)
"""
PAGES = {
    "index": "首页\n====\n\n.. toctree::\n\n   one\n   two\n",
    "one": "第一页\n======\n\nDDP 里的梯度累积 accumulation 用 no_sync 完成。\n",
    "two": "第二页\n======\n\n梯度先求和。再由优化器更新。累积的误差很小。桶的大小可调。\n",
}
FOUND = {
    "梯度累积": {"one"},
    "度累": {"one"},
    "梯度": {"one", "two"},
    "桶": {"two"},
    "梯度累积 accumulation": {"one"},
    "accumulations": {"one"},  # stemmed
    "批归一化": set(),
}


def test_words_are_pairs_characters_and_what_is_not_chinese() -> None:
    split = SearchPairs({}).split
    assert split("梯度累积") == ["梯", "度", "累", "积", "梯度", "度累", "累积"]
    assert split("用DDP的no_sync。16 步") == ["用", "DDP", "的", "no_sync", "16", "步"]
    assert split("桶。") == ["桶"]


@pytest.mark.slow
def test_a_browser_finds_what_is_asked(tmp_path: Path) -> None:
    words = [*browser(tmp_path), "--virtual-time-budget=20000", "--dump-dom"]
    (tmp_path / "conf.py").write_text(CONF.format(root=str(ROOT)))
    for name, text in PAGES.items():
        (tmp_path / f"{name}.rst").write_text(text, encoding="utf-8")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "sphinx", "-q", str(tmp_path), str(site)], check=True, timeout=240)
    for asked, pages in FOUND.items():
        address = f"{(site / 'search.html').as_uri()}?q={quote(asked)}"
        shown = subprocess.run([*words, address], capture_output=True, text=True, timeout=240, check=True).stdout
        results = html.unescape(shown).partition('id="search-results"')[2]
        found = set(re.findall(r'<li class="kind-\w+">\s*<a href="(\w+)\.html', results))
        assert found == pages, (asked, results[:2000])
