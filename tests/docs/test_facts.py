"""What the pages say is true of the program: flags, recipes, public names, links, the commands of the README."""

import re
from pathlib import Path

import pytest

import lockstep
from lockstep.commands.compare import Plan as Compare
from lockstep.commands.export import Export
from lockstep.commands.forecast import Plan as Forecast
from lockstep.commands.launch_script import SlurmPlan
from lockstep.commands.lr_find import Plan as LrFind
from lockstep.commands.predict import Predict
from lockstep.commands.preview import Preview
from lockstep.commands.report.command import Report
from lockstep.commands.sweep import Plan as Sweep
from lockstep.config import Config
from lockstep.config.execution import Evaluation
from lockstep.config.fields import flag_names
from lockstep.config.flags import HABITS, SHORT
from lockstep.config.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *ROOT.glob("src/**/*.md")]
)
# of the command itself, switches, and what is taken from habit
BESIDE = {"--help", "--version", "--config", "--trust-code", "--toml", "--all", *SHORT, *HABITS}
_COMMAND = re.compile(r"lockstep (?:train|eval|predict|export)\b[^`\n]*|`(--[^`\n]*)`")
_PATH = re.compile(r"(?<![\w/.~-])(?:\.ci|\.github|benchmarks|docs|examples|packages|src|tests)/[\w./*-]*[\w*]")
_NAME = re.compile(r"(?<!tool\.)\b(?:ls|lockstep)\.([A-Za-z_]+)\b(?![.\w]*:)")


def flags_of_lockstep(text: str) -> set[str]:
    """The flags that a page gives as ours: after `lockstep train`, or alone in backticks."""
    return {flag for found in _COMMAND.finditer(text) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", found[0])}


def not_flags(text: str) -> set[str]:
    classes = (Config, Compare, Evaluation, Export, Forecast, LrFind, Predict, Preview, Report, SlurmPlan, Sweep)
    ours = {flag for cls in classes for flag in flag_names(cls)}
    return flags_of_lockstep(text) - ours - BESIDE


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "README.zh-CN.md", "docs/zh/guide.md", "CHANGELOG.md"])
def test_every_flag_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    if page == "CHANGELOG.md":  # what is gone stands in the left column
        text = re.sub(r"^\| [^|]+ \|", "|", text, flags=re.MULTILINE)
    assert not not_flags(text)


def test_every_flag_of_the_right_hand_columns_exists() -> None:
    rows = [line.rsplit("|", 2)[1] for line in (ROOT / "docs/coming-from.md").read_text().splitlines() if "| `" in line]
    assert len(rows) > 50
    assert not not_flags("\n".join(rows))


def test_a_flag_that_does_not_exist_would_be_seen() -> None:
    assert not_flags("run `lockstep train mnist --nprocs 2` with `--batch-sise 3`") == {"--nprocs", "--batch-sise"}


def anchors(text: str) -> set[str]:
    """What a page's headings are called in a link to them; the second of a name has -1 after it."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} (.+?) *#*$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # of a link its text
        slug = re.sub(r"[^\w -]", "", shown.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{number}" if number else slug for slug, last in found.items() for number in range(last + 1)}


def broken_links(page: Path) -> list[str]:
    """The links and pictures of a page that lead to no file of this tree, or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", page.read_text())):
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        if target.startswith("https://"):
            continue
        if not aim.exists() or (anchor and anchor not in anchors(aim.read_text())):
            broken.append(target)
    return broken


def missing_paths(page: Path) -> list[str]:
    """What a page names as a file or folder of this tree, anywhere in it, and what is not there."""
    return [path for path in _PATH.findall(page.read_text()) if not any(ROOT.glob(path))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_files_and_public_names_are_there(page: Path) -> None:
    assert not broken_links(page)
    assert not missing_paths(page)
    for name in _NAME.findall(page.read_text()):
        assert name in lockstep.__all__ or (ROOT / "src/lockstep" / name).is_dir(), f"lockstep.{name}"


def test_a_file_that_is_not_there_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`python benchmarks/gone.py`, tests/docs/test_*.py, ~/docs/none, src/lockstep. docs/zh/no/x.md.\n")
    assert missing_paths(page) == ["benchmarks/gone.py", "docs/zh/no/x.md"]


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs").rglob("*.png"))
    assert pictures
    assert not [path.name for path in pictures if path.stat().st_size > 200_000]


def test_a_link_that_leads_nowhere_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# 批大小 `a_b`\n## Twice\n## Twice\n```\n# no heading\n```\n")
    good = "[a](#批大小-a_b) [b](page.md#twice-1) [c](https://example.org/x#y) ![d](page.md)"
    bad = ["#no-heading", "page.md#twice-2", "gone.md", "http://example.org"]
    page.write_text(page.read_text() + good + "".join(f" [x]({target})" for target in bad))
    assert broken_links(page) == bad


def test_the_guide_names_all_that_is_public() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    internal = {"UserError", "WorkerFailed", "Batch", "__version__"}
    assert not [name for name in lockstep.__all__ if name not in internal and not re.search(rf"\b{name}\b", guide)]


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_readme_has_the_two_commands(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    assert lines.index("pip install . && lockstep train") < 15
    assert "pip install '.[dev]' && pytest" in lines


def test_the_guide_has_all_recipes() -> None:
    guide = (ROOT / "docs/guide.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*?\| (\d+), (\d+) \|", guide, re.MULTILINE)
    assert rows == [(name, str(make().batch_size), str(make().epochs)) for name, make in RECIPES.items()]


def test_the_readmes_say_the_same_and_their_figures_are_measured() -> None:
    cell = re.compile(r"[\d.]+ \[[\d.]+, [\d.]+\]")
    tables = [cell.findall((ROOT / page).read_text()) for page in ("README.md", "README.zh-CN.md")]
    assert tables[0] == tables[1]
    measured = (ROOT / "docs/benchmarks.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (.*) \|$", measured.partition("Lockstep's images/s over each side's")[2], re.MULTILINE
    )
    both = [cells.split(" | ") for _, cells in rows if cell.match(cells)]
    fp32 = [f"{cells[2]} {cells[4]}" for cells in both if len(cells) == 6]  # 1 x 2 and 2 x 1
    assert len(tables[0]) == 32
    for first, second in zip(tables[0][::2], tables[0][1::2], strict=True):
        assert f"{first} {second}" in fp32
    whole_loop = re.findall(r"takes ([\d.]+) times the time of a loop by", (ROOT / "README.md").read_text())
    assert re.findall(r"^\| fit \| \d+ \| ([\d.]+) \[", measured, re.MULTILINE) == whole_loop
    assert whole_loop[0] in (ROOT / "README.zh-CN.md").read_text()


def test_every_kind_of_fault_has_its_test() -> None:
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| .* \| `([^`]+)::(test_\w+)` \|$", page, re.MULTILINE)
    assert len(rows) >= 30
    for file, name in rows:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
