"""The pages of both languages: the same list, and each in the list of the front page."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ENGLISH = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "zh" not in path.relative_to(DOCS).parts}
CHINESE = {str(path.relative_to(DOCS / "zh")) for path in (DOCS / "zh").rglob("*.md")}


def listed(front: Path) -> list[list[str]]:
    """The entries of each list of an index, patterns as they are; where it has no list, docs/conf.py gives it one."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```$", front.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [[line for line in block.splitlines() if line and line[0] != ":"] for block in blocks] or [["*"]]


def test_both_languages_have_the_same_pages() -> None:
    assert not ENGLISH - CHINESE, "in Chinese these are missing: write docs/zh/ of the same name"
    assert not CHINESE - ENGLISH, "in English these are missing"
    assert len(ENGLISH) > 15


@pytest.mark.parametrize("page", sorted(ENGLISH))
def test_the_front_page_lists_every_page(page: str) -> None:
    name = page.removesuffix(".md")
    front = DOCS / "index.md"
    lists = {front: ""} | {path: f"{path.parent.name}/" for path in DOCS.glob("[!z]*/index.md")}
    patterns = [f"{folder}{entry}" for path, folder in lists.items() for each in listed(path) for entry in each]
    assert name == "index" or any(fnmatchcase(name, pattern) for pattern in patterns), (
        f"docs/{page} is in no list of docs/index.md, or of its folder's: write its name there, in both languages"
    )


@pytest.mark.parametrize("front", sorted(DOCS.glob("**/index.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_both_languages_list_the_same(front: Path) -> None:
    twin = DOCS / "zh" / front.relative_to(DOCS)
    if "zh" not in front.relative_to(DOCS).parts and twin.exists():
        assert listed(front) == listed(twin)
