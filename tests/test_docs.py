"""What the pages say is true of the program: flags, recipes, public names, links, the commands of the README."""

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.config import Config
from lockstep.config.flags import known_flags
from lockstep.config.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BESIDE = {"--help", "--version", "--weights"}  # of the command itself, and of eval
_COMMAND = re.compile(r"lockstep (?:train|eval)\b[^`\n]*|`(--[^`\n]*)`")
_NAME = re.compile(r"\b(?:ls|lockstep)\.([A-Za-z_]+)\b(?![.\w]*:)")


def _ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def flags_of_lockstep(text: str) -> set[str]:
    """The flags that a page gives as ours: after `lockstep train`, or alone in backticks."""
    return {flag for found in _COMMAND.finditer(text) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", found[0])}


def not_flags(text: str) -> set[str]:
    return flags_of_lockstep(text) - set(known_flags(Config)) - BESIDE


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in ("README.md", "guide.md")], ids=_ids)
def test_every_flag_exists(page: Path) -> None:
    assert not not_flags(page.read_text())


def test_every_flag_of_the_right_hand_columns_exists() -> None:
    rows = [line.rsplit("|", 2)[1] for line in (ROOT / "docs/coming-from.md").read_text().splitlines() if "| `" in line]
    assert len(rows) > 50
    assert not not_flags("\n".join(rows))


def test_a_flag_that_does_not_exist_would_be_seen() -> None:
    assert not_flags("run `lockstep train mnist --nprocs 2` with `--batch-sise 3`") == {"--nprocs", "--batch-sise"}


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", aim.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_public_names_exist(page: Path) -> None:
    for name in _NAME.findall(page.read_text()):
        assert name in lockstep.__all__ or (ROOT / "src/lockstep" / name).is_dir(), f"lockstep.{name}"


def test_the_guide_names_all_that_is_public() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    internal = {"UserError", "WorkerFailed", "Batch", "__version__"}
    assert not [name for name in lockstep.__all__ if name not in internal and not re.search(rf"\b{name}\b", guide)]


def test_the_readme_has_the_two_commands_and_all_recipes() -> None:
    readme = (ROOT / "README.md").read_text()
    lines = readme.splitlines()
    assert "pip install . && lockstep train" in lines
    assert "pip install '.[dev]' && pytest" in lines
    rows = re.findall(r"^\| `([\w-]+)` \|.*?\| (\d+), (\d+) \|", readme, re.MULTILINE)
    assert rows == [(name, str(make().batch_size), str(make().epochs)) for name, make in RECIPES.items()]
