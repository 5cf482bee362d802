"""The reference has every flag, record, file, error and public name there is."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from docs.from_code import chinese, errors, escaped, flags
from docs.from_code.parts import PARTS

import lockstep
from lockstep.commands import COMMANDS
from lockstep.commands.shared.help import EVERYDAY
from lockstep.config import DataConfig, OptimConfig
from lockstep.errors import UserError
from tests.subprocesses import run_lockstep

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference"
SPAN = re.compile(r"`([^`]+)`")


@pytest.fixture(scope="module")
def parts() -> dict[str, str]:
    return {name: make("en") for name, make in PARTS.items()}


def test_every_part_has_its_page_in_both_languages() -> None:
    for folder in (REFERENCE, ROOT / "docs/zh/reference"):
        pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
        found = [name for page in pages.values() for name in re.findall(r"^<!-- generated: (\w+) -->$", page, re.M)]
        assert sorted(found) == sorted(PARTS)


def test_pages_of_a_checkout_do_not_link_what_only_the_site_completes() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 50
    assert not [page for page in pages if re.search(r"\]\([^)]*reference/", page.read_text(encoding="utf-8"))]


def test_every_flag_is_there_with_a_help_text(parts: dict[str, str]) -> None:
    page = parts["commands"]
    assert flags.every_flag() <= set(SPAN.findall(page))
    assert [name for name in COMMANDS if f"\n## lockstep {name}\n" not in f"\n{page}"] == []
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    assert len(rows) > 150
    assert not [row for row in rows if not row.split(" | ")[-1].strip(" |")]


def test_what_flags_take_and_the_everyday_ones_do_is_told_in_chinese(parts: dict[str, str]) -> None:
    """A flag that becomes an everyday one needs its row in docs/from_code/chinese.py, and one that goes leaves none."""
    everyday = {flag for lines in EVERYDAY.values() for flag in lines}
    assert everyday == set(chinese.FLAGS)
    train, page = (
        text.partition("## lockstep train\n")[2].partition("\n## ")[0]
        for text in (parts["commands"], flags.commands("zh"))
    )
    takes = {row.split(" | ")[1] for row in train.splitlines() if row.startswith("| `--")}
    assert {each for each in takes if each and "`" not in each} == set(chinese.TAKES)
    rows = [row for row in page.splitlines() if row.startswith("| `--")]
    assert len(rows) == len([row for row in train.splitlines() if row.startswith("| `--")])
    for flag in everyday:
        (row,) = [row for row in rows if row.startswith(f"| `{flag}`")]
        assert row.endswith(f"{chinese.FLAGS[flag]} |"), row
    assert not [row for row in rows if "whole number" in row.split(" | ")[1]]


def test_a_flag_without_a_help_text_would_be_seen() -> None:
    @dataclasses.dataclass(frozen=True)
    class Given:
        """Some flags."""

        first: int = 1
        """What it is."""
        second: bool = False

    (rows,) = flags.groups(Given()).values()
    assert rows["--first"] == ["`--first`", "a whole number", "`1`", "What it is."]
    assert rows["--second"] == ["`--second`, `--no-second`", "", "`no`", ""]


def test_every_error_is_there() -> None:
    raised = {
        (path, node.lineno)
        for path in (ROOT / "src/lockstep").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if ast.unparse(node.exc.func) in ("UserError", "unknown")
    }
    found = errors.errors()
    assert len(raised) > 200
    assert raised <= {(error.path, error.line) for error in found}
    quiet = {f"{error.path.name}: {error.message}" for error in found if error.says_nothing}
    passed_on = {f"{file}.py: MESSAGE" for file in ("fields", "flags", "loader_workers", "picture_set")}
    passed_on |= {f"{file}.py: ..." for file in ("remote", "rendezvous", "self_check")}
    assert quiet <= passed_on, "these say nothing themselves"


def test_an_error_reads_as_it_is_raised(parts: dict[str, str]) -> None:
    lines = parts["errors"].splitlines()
    assert "| `--decode-size` DECODE_SIZE: images of SIDE pixels would be enlarged from it | " in "\n".join(lines)
    with pytest.raises(UserError, match="--decode-size 100: images of 224 pixels would be enlarged from it"):
        DataConfig(decode_size=100)
    why = "Nesterov's is a momentum of SGD"
    assert f"| `--nesterov` with `--optimizer`: {why} | Leave one of them out. |" in lines
    with pytest.raises(UserError) as raised:
        OptimConfig(nesterov=True, optimizer="adam")
    assert raised.value.message == f"--nesterov with --optimizer adam: {why}"


def test_every_public_name_is_there(parts: dict[str, str]) -> None:
    heads = re.findall(r"^## (\w+)$", parts["python"], re.MULTILINE)
    assert sorted(heads) == sorted(set(lockstep.__all__) - {"__version__"})
    assert "def launch(" in parts["python"]


def test_a_text_of_the_program_stays_as_it_is_in_a_table() -> None:
    assert escaped("give --lr *x* or `a|b`\n [c]") == "give `--lr` \\*x\\* or `a\\|b` \\[c\\]"


@pytest.mark.slow
def test_every_file_of_a_run_is_on_the_page(tmp_path: Path) -> None:
    words = ("--epochs", "1", "--ema", "0.9", "--log", "csv,tensorboard", "--threads", "1", "--nproc", "1")
    ended = run_lockstep("train", "digits", *words, "--out", "run", cwd=tmp_path, timeout=300)
    assert ended.code == 0, ended.text
    page = (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")
    names = {name for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in SPAN.findall(row)}
    found = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert len(found) >= 10
    assert not [file for file in found if not any(covers(name, file) for name in names)]


def covers(name: str, file: str) -> bool:
    """Whether a name of the page is a file's, or that of a folder around it."""
    pattern = re.escape(name).replace(r"\*", "[^/]*")
    return re.fullmatch(f"{pattern}.*" if name.endswith("/") else pattern, file) is not None
