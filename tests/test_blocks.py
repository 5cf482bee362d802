"""Every block of code on every page is run by a test, equals a file, or is counted among those that none runs.

Chinese pages show the blocks of the English ones (tests/test_docs_zh.py), so the English pages' are looked at here.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "zh" not in path.parts)]
SOURCES = [path.read_text(encoding="utf-8") for path in ROOT.glob("examples/**/*.py")]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"\$? ?(lockstep [a-z]|(torchrun|mpirun|srun) .*lockstep [a-z])")  # tests/test_docs_commands.py

RUN = {  # pages -> the tests that run what they show and compare what it prints
    "docs/quickstart.md": "tests/test_quickstart.py",
    "docs/course/*": "tests/course/test_pages.py",
    "docs/concepts/*": "tests/concepts/test_pages.py",
    "docs/internals/*": "tests/internals/test_internals.py",
    "docs/why-accuracy-differs.md": "tests/why/test_pages.py",
    "docs/batch-size.md": "tests/why/test_pages.py",
    "docs/measuring.md": "tests/why/test_pages.py",
    "docs/coming-from*": "tests/test_docs.py",
    "docs/watching.md": "tests/test_watching_page.py",
    "docs/audit.md": "tests/audit/test_scripts.py",
    "docs/lint.md": "tests/lint/test_hook.py",  # and tests/lint/test_command.py: the list and the table
    "docs/lint/LS*.md": "tests/lint/test_code_pages.py",
    "docs/lint/index.md": "tests/lint/test_examples_run.py",
}
PROGRAMS = {  # pages -> the tests that run their blocks of Python
    "docs/checkpoints.md": "tests/test_docs_programs.py",
    "docs/exact.md": "tests/test_docs_programs.py",
    "docs/faults.md": "tests/test_docs_programs.py",
    "docs/guide.md": "tests/test_docs_programs.py",
    "docs/slow-links.md": "tests/test_docs_programs.py",
    "docs/overview.md": "tests/test_examples.py",
    "README.md": "tests/test_examples.py",
}
NONE = {  # pages -> why some of their blocks are run by no test
    "README.md": "installing takes gigabytes; .ci/run does it",
    "docs/index.md": "installing takes gigabytes; .ci/run does it",
    "docs/overview.md": "a list of files",
    "docs/checkpoints.md": "a list of files",
    "docs/compare.md": "a list of files",
    "docs/clusters.md": "for Slurm, Kubernetes and several machines",
    "docs/design.md": "lists: floors, which tests/test_structure.py reads, and calls",
    "docs/doctor.md": "what one machine found",
    "docs/faults.md": "what faults print, made by tests of their own",
    "docs/guide.md": "what runs of minutes printed",
    "docs/photos.md": "what runs on photographs printed, which are not in the tree",
    "docs/verify.md": "a function to fill in",
}
MOST = 38  # blocks that no test runs: this number goes down


def run_by_none(page: Path) -> list[str]:
    """The first lines of a page's blocks that no rule covers."""
    name = str(page.relative_to(ROOT))
    found = []
    for language, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line for line in body.splitlines() if line.strip()]
        run = any(fnmatchcase(name, pattern) for pattern in RUN)
        program = language == "python" and (name in PROGRAMS or any(body in source for source in SOURCES))
        parsed = all(COMMAND.match(line) for line in lines)
        if not (run or program or parsed or language == "{toctree}"):
            found.append(lines[0])
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_has_a_reason(page: Path) -> None:
    assert not run_by_none(page) or str(page.relative_to(ROOT)) in NONE, (
        "name the test that runs them, or why none does"
    )


def test_those_that_no_test_runs_become_fewer() -> None:
    assert sum(len(run_by_none(page)) for page in PAGES) <= MOST
    for test in {*RUN.values(), *PROGRAMS.values()}:
        assert (ROOT / test).exists(), test


def test_the_overview_shows_the_loop_of_the_readme() -> None:
    (readme, overview) = (
        [body for language, body in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if language == "python"]
        for page in ("README.md", "docs/overview.md")
    )
    assert readme == overview


def test_a_block_that_no_test_runs_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_blocks.ROOT", tmp_path)
    page = tmp_path / "new.md"
    page.write_text("```\nlockstep train\n```\n```python\nprint(0)\n```\n```console\n$ ls\n```\n")
    assert run_by_none(page) == ["print(0)", "$ ls"]
