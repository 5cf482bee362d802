"""The hook that other projects name in their .pre-commit-config.yaml, run by pre-commit on a commit of theirs."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from docs.from_code import lint as pages

from lockstep.commands.lint.output import written
from tests.subprocesses import Command, Ended

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/lint.md"


def block(language: str, beginning: str) -> str:
    """The block of docs/lint.md that begins so."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.S) if beginning in text]
    (text,) = found
    assert isinstance(text, str)
    return text


def test_the_page_shows_what_lint_says() -> None:
    said = written(list(pages.found_in(pages.read("LS103", chinese=False).wrong)), "text")
    assert said in block("console", "$ pre-commit run --all-files")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="pre-commit works on git repositories")
def test_the_hook_finds_a_fault_in_what_is_committed(tmp_path: Path) -> None:
    commands, published, project = (tmp_path / name for name in ("bin", "lockstep", "project"))
    for folder in (commands, published, project):
        folder.mkdir()
    script = commands / "lockstep"  # as the project's environment has it
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lockstep "$@"\n')
    script.chmod(0o755)
    env = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PRE_COMMIT_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "default",  # pre-commit's own
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "somebody" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def run(*argv: str, cwd: Path) -> Ended:
        return Command(*argv, cwd=cwd, env=env).end(timeout=120)

    shutil.copy(ROOT / ".pre-commit-hooks.yaml", published)
    for argv in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "hooks")):
        assert run("git", *argv, cwd=published).code == 0
    commit = run("git", "rev-parse", "HEAD", cwd=published).out.strip()

    config = block("yaml", "id: lockstep-lint").replace("ADDRESS", str(published)).replace("COMMIT", commit)
    (project / ".pre-commit-config.yaml").write_text(config)
    (project / "train.py").write_text(pages.read("LS103", chinese=False).wrong)
    for argv in (("init", "-q"), ("add", "-A")):
        assert run("git", *argv, cwd=project).code == 0
    hook = (sys.executable, "-m", "pre_commit", "run", "--all-files")
    ended = run(*hook, cwd=project)
    assert ended.code == 1, ended.text
    shown = block("console", "$ pre-commit run --all-files")
    assert shown.partition("\n")[2].strip() in ended.out, ended.text

    (project / "train.py").write_text(pages.read("LS103", chinese=False).right)
    assert run("git", "add", "-A", cwd=project).code == 0
    ended = run(*hook, cwd=project)
    assert ended.code == 0, ended.text
    assert "Passed" in ended.out
