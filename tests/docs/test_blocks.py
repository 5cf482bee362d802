"""Every block of code on every page is run by a test, equals a file, or is counted among those that none runs.

Chinese pages show the blocks of the English ones (tests/docs/test_chinese.py), so only the English ones are looked at.
"""

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "zh" not in path.parts)]
SOURCES = [path.read_text(encoding="utf-8") for path in ROOT.glob("examples/**/*.py")]
BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(  # tests/docs/test_commands.py; tests/docs/test_examples.py
    r"\$? ?(lockstep [a-z]|(torchrun|mpirun|srun) .*lockstep [a-z]|torchrun --nproc-per-node 4 examples/own_loop.py$)"
)

RUN = {  # pages -> the tests that run what they show and compare what it prints
    "docs/quickstart.md": "tests/docs/test_consoles.py",
    "docs/course/*": "tests/docs/course/test_pages.py",
    "docs/concepts/*": "tests/docs/concepts/test_pages.py",
    "docs/internals/*": "tests/docs/internals/test_internals.py",
    "docs/why-accuracy-differs.md": "tests/docs/why/test_pages.py",
    "docs/batch-size.md": "tests/docs/why/test_pages.py",
    "docs/measuring.md": "tests/docs/why/test_pages.py",
    "docs/coming-from*": "tests/docs/test_facts.py",
    "docs/watching.md": "tests/docs/test_consoles.py",
    "docs/elastic.md": "tests/docs/test_consoles.py",
    "docs/audit.md": "tests/audit/test_scripts.py",
}
_PAGES = ("checkpoints", "exact", "faults", "guide", "photos", "run-folder", "slow-links", "verify")
PROGRAMS = {f"docs/{name}.md": "tests/docs/test_programs.py" for name in _PAGES}  # those that run blocks of Python
PROGRAMS["README.md"] = "tests/docs/test_examples.py"
_OUTPUT = "tests/docs/test_page_output.py::test_"
COMPARED = {  # (page, how the block begins) -> the test that compares it with what is printed, written or read
    ("docs/checkpoints.md", "checkpoints/step-"): f"{_OUTPUT}a_checkpoint_has_the_files_that_the_page_lists",
    ("docs/clusters.md", "#!/bin/bash"): "tests/commands/test_launch_script.py::test_the_page_shows_what_is_written",
    ("docs/design.md", "0  lockstep"): "tests/test_structure.py::test_nothing_imports_from_a_floor_above",
    ("docs/design.md", "order.step"): f"{_OUTPUT}one_step_is_made_of_what_the_design_lists",
    ("docs/doctor.md", "ok      torch"): f"{_OUTPUT}the_doctor_checks_what_the_page_shows",
    ("docs/faults.md", "lockstep: the ranks differ"): f"{_OUTPUT}ranks_that_differ_are_named_as_the_page_has_it",
    (
        "docs/guide.md",
        "$ lockstep train cifar10 --opt",
    ): "tests/config/test_changes.py::test_the_command_says_what_gave_way",
    ("docs/guide.md", "$ lockstep lr-find"): "tests/docs/test_programs.py::test_the_suggested_rate_is_the_pages",
    ("docs/guide.md", "$ lockstep sweep"): f"{_OUTPUT}a_sweep_prints_the_table_of_the_page",
    ("docs/guide.md", "note: weights will differ"): f"{_OUTPUT}a_model_that_looks_at_its_whole_batch_is_named",
    ("docs/photos.md", "path,label,split"): f"{_OUTPUT}the_tables_are_read_as_the_page_has_them",
    ("docs/photos.md", "frozen: "): f"{_OUTPUT}what_is_frozen_is_said_as_the_page_has_it",
    ("docs/photos.md", "layer decay "): f"{_OUTPUT}smaller_rates_below_are_said_as_the_page_has_it",
    ("docs/photos.md", "an epoch is"): f"{_OUTPUT}rare_classes_are_said_as_the_page_has_it",
    ("docs/photos.md", "class weights: "): f"{_OUTPUT}rare_classes_are_said_as_the_page_has_it",
    ("docs/reproduce.md", "main.py: Net"): "tests/reproduce/test_page.py::test_the_sentences_are_those_of_the_report",
    ("docs/reproduce.md", "losses of"): "tests/reproduce/test_page.py::test_the_differences_are_those_of_the_losses",
    ("docs/reproduce.md", "backward is "): "tests/reproduce/test_page.py::test_what_is_refused_is_on_both_pages",
}
NONE = {  # pages -> why some of their blocks are run by no test
    "README.md": "installing takes gigabytes; .ci/run does it",
    "docs/index.md": "installing takes gigabytes; .ci/run does it",
    "docs/compare.md": "a list of files",
    "docs/clusters.md": "for Kubernetes",
    "docs/doctor.md": "what one machine found",
    "docs/faults.md": "what faults print, made by tests of their own",
    "docs/guide.md": "installing takes gigabytes",
    "docs/lint.md": "settings and a hook; packages/lockstep_lint/tests has them",
    "docs/photos.md": "what runs on photographs printed, which are not in the tree",
}
MOST = 16  # blocks that no test runs: this number goes down


def kinds(path: Path) -> list[tuple[str, str]]:
    """Of each of a page's blocks what is done with it, "" where no rule covers it, and its first line."""
    name = str(path.relative_to(ROOT))
    found = []
    for language, body in BLOCK.findall(path.read_text(encoding="utf-8")):
        lines = [line for line in body.splitlines() if line.strip()]
        run = any(fnmatchcase(name, pattern) for pattern in RUN)
        program = language == "python" and (name in PROGRAMS or any(body in source for source in SOURCES))
        parsed = all(COMMAND.match(line) for line in lines if not line.startswith("# "))
        compared = any(name == page and body.startswith(begins) for page, begins in COMPARED)
        if language != "{toctree}":
            which = {"run": run, "run as programs": program, "read as commands": parsed, "compared": compared}
            found.append((next((kind for kind, is_so in which.items() if is_so), ""), lines[0]))
    return found


def run_by_none(path: Path) -> list[str]:
    """The first lines of a page's blocks that no rule covers."""
    return [first for kind, first in kinds(path) if not kind]


def tally() -> str:
    """What is done with the blocks of all English pages; the Chinese ones have the same."""
    from tests.docs.test_commands import all_commands

    count = Counter(
        kind or "run by no test, for a reason that stands in tests/docs/test_blocks.py"
        for page in PAGES
        for kind, _ in kinds(page)
    )
    parts = ", ".join(f"{number} {kind}" for kind, number in count.most_common())
    return f"{count.total()} blocks on {len(PAGES)} pages: {parts}; {len(all_commands())} different command lines"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_run_or_has_a_reason(page: Path) -> None:
    assert not run_by_none(page) or str(page.relative_to(ROOT)) in NONE, (
        "name the test that runs them, or why none does"
    )


def test_those_that_no_test_runs_become_fewer() -> None:
    assert sum(len(run_by_none(page)) for page in PAGES) <= MOST
    for test in {*RUN.values(), *PROGRAMS.values()}:
        assert (ROOT / test).exists(), test
    for (page, begins), test in COMPARED.items():
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), test
        assert f"\n{begins}" in (ROOT / page).read_text(encoding="utf-8"), (page, begins)


def test_a_block_that_no_test_runs_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.test_blocks.ROOT", tmp_path)
    page = tmp_path / "new.md"
    page.write_text("```\nlockstep train\n```\n```python\nprint(0)\n```\n```console\n$ ls\n```\n")
    assert run_by_none(page) == ["print(0)", "$ ls"]


def test_all_blocks_are_counted() -> None:
    total, *parts = map(int, re.findall(r"(?<!\S)(\d+) (?!pages|different)", tally()))
    assert total == sum(parts) > 200


if __name__ == "__main__":
    print(tally())
