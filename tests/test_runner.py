"""One list of what a change has to pass: .ci/run, the workflow and the pages name noxfile.py's sessions."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text())
SESSIONS = {
    node.name: ast.unparse(node)
    for node in NOXFILE.body
    if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "nox.session" for each in node.decorator_list)
}


def test_ci_runs_every_session_but_the_benchmarks_and_the_tests_by_the_readme_s_command() -> None:
    run = (ROOT / ".ci/run").read_text()
    named = re.findall(r"^ *(?:LOCKSTEP_TESTS_SECONDS=\d+ )?(?:session|part|stage) ([a-z]+) \d+\b", run, re.MULTILINE)
    assert set(named) == set(SESSIONS) - {"test", "bench", "exhaustive"}
    assert "pip install '.[dev]' && pytest" in run


def test_the_workflow_runs_ci() -> None:
    steps = (ROOT / ".github/workflows/ci.yml").read_text().partition("steps:")[2]
    assert re.findall(r"- run: (.*)", steps) == [".ci/run"]


def test_every_marker_that_the_default_run_leaves_out_has_a_session_of_its_name() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = {line.partition(":")[0] for line in options["markers"]}
    assert {marker for marker in markers if f"not {marker}" in options["addopts"]} == markers
    for marker in markers:
        assert f"_marked(session, '{marker}" in SESSIONS[marker]


def test_every_file_that_a_session_names_exists() -> None:
    named = set(re.findall(r"'((?:tests|benchmarks|docs)/[\w/.]+)'", "\n".join(SESSIONS.values())))
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_session_that_a_page_names_exists() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/README.md"]
    named = {
        name
        for page in pages
        for line in re.findall(r"\bnox -s ([^`\n]*)", page.read_text())
        for name in re.split(r" {2,}| -- |[^a-z ]", line)[0].split()
    }
    assert named, "no page names one"
    assert named <= set(SESSIONS)
