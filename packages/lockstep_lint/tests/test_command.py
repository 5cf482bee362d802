"""The command: its exit codes, formats, settings and silencing, and what it does with files that are no programs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep_lint
from bases import DDP, ONE_PROCESS
from lockstep_lint import __version__
from lockstep_lint.cli import main
from lockstep_lint.output import printable
from lockstep_lint.rules import all_rules

WRONG = ONE_PROCESS.replace(", shuffle=True", "")  # LS112
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(lockstep_lint.__file__).parents[1])}
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(WRONG)
    return tmp_path


@pytest.mark.slow
def test_the_wheel_alone(folder: Path) -> None:
    package = Path(__file__).parents[1]
    shutil.copytree(package, "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "tests"))
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", "wheels", "./source"]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = Path("wheels").iterdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "fresh"], check=True, timeout=120)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=own, timeout=120)
    python = folder / "fresh/bin/python"
    assert run([*pip, "--python", python, "install", "--no-index", wheel]).returncode == 0  # it needs nothing else
    assert run([python, "-c", "import torch"]).returncode == 1
    for command in ([folder / "fresh/bin/lockstep-lint"], [python, "-m", "lockstep_lint"]):
        ended = run([*command, "train.py"])
        assert (ended.returncode, ended.stderr) == (1, "")
        assert "LS112 The training loader is never shuffled" in ended.stdout


def codes(output: str) -> list[str]:
    return [each["code"] for each in json.loads(output)]


def test_exit_codes(folder: Path, capsys: Captured) -> None:
    assert main([]) == 1
    assert main(["train.py"]) == 1
    assert main(["--ignore", "LS112"]) == 0
    assert main(["--select", "LS3"]) == 0
    Path("empty").mkdir()
    assert main(["empty"]) == 0
    assert capsys.readouterr().err == "lockstep-lint: no Python file in empty\n"
    for arguments, word in [
        (["nowhere.py"], "does not exist"),
        (["--select", "E501"], "no rule begins with"),
        (["--explain", "LS999"], "there is no rule LS999"),
        (["--format", "xml"], "invalid choice"),
    ]:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert word in captured.err
        assert captured.out == ""


def test_text(folder: Path, capsys: Captured) -> None:
    main(["train.py"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "train.py:26:16: LS112 The training loader is never shuffled"
    assert lines[1].startswith("    Every epoch has")
    assert lines[-1] == "1 finding in 1 file; --explain CODE says more"


def test_formats_for_programs(folder: Path, capsys: Captured) -> None:
    main(["--format", "json"])
    (entry,) = json.loads(capsys.readouterr().out)
    assert {**entry, "result": ""} == {
        "file": "train.py",
        "line": 26,
        "column": 16,
        "end_line": 26,
        "code": "LS112",
        "name": "never-shuffled",
        "title": "The training loader is never shuffled",
        "detail": "",
        "result": "",
    }
    main(["--format", "github"])
    output = capsys.readouterr().out
    assert output.startswith("::warning file=train.py,line=26,endLine=26,col=16,title=LS112::The training loader")
    assert output.count("\n") == 1
    main(["--format", "sarif"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["tool"]["driver"]["version"] == __version__
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "LS112"
    location = result["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "train.py"
    assert location["region"] == {"startLine": 26, "startColumn": 16, "endLine": 26}
    Path("train.py").write_text(ONE_PROCESS)
    for name, nothing in [("text", ""), ("json", "[]\n"), ("github", "")]:
        assert main(["--format", name]) == 0
        assert capsys.readouterr().out == nothing


def test_rules_and_pages(capsys: Captured) -> None:
    rules = all_rules()
    assert main(["--rules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(rules)
    for code, rule in rules.items():
        assert main(["--explain", code.lower()]) == 0
        output = capsys.readouterr().out
        assert output.startswith(f"{code} {rule.name}")
        assert all(each in output for each in ("Wrong:", "Right:", rule.wrong.splitlines()[0]))


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("  # noqa", 0),
        ("  # NOQA: ls112", 0),
        ("  # noqa: LS101, LS112", 0),
        ("  # noqa: LS1", 0),
        ("  # noqa: LS101", 1),
        ("  # noqa: E501", 1),
        ("", 1),
    ],
)
def test_noqa(folder: Path, comment: str, found: int) -> None:
    Path("train.py").write_text(WRONG.replace("batch_size=64)\ntest_loader", f"batch_size=64){comment}\ntest_loader"))
    assert main([]) == found


def test_noqa_at_the_end_of_a_long_call(folder: Path) -> None:
    text = WRONG.replace("(train_set, batch_size=64)", "(\n    train_set,\n    batch_size=64,\n)  # noqa: LS112")
    Path("train.py").write_text(text)
    assert main([]) == 0


def test_settings(folder: Path, capsys: Captured) -> None:
    settings = Path("pyproject.toml")
    settings.write_text("[tool.lockstep.lint]\nignore = ['LS112']\n")
    assert main([]) == 0
    assert main(["--ignore", ""]) == 1
    settings.write_text("[tool.lockstep.lint]\nselect = ['LS3']\n")
    assert main([]) == 0
    assert main(["--select", "all"]) == 1
    settings.write_text("[tool.other]\n")
    assert main([]) == 1
    capsys.readouterr()
    for text in ("[tool.lockstep.lint]\nselect = 'LS3'\n", "[tool.lockstep.lint]\nfix = []\n", "[tool", "tool = 1\n"):
        settings.write_text(text)
        assert main([]) == 2
        assert "pyproject.toml" in capsys.readouterr().err


def test_folders_leave_out_tests_and_hidden_files(folder: Path, capsys: Captured) -> None:
    for name in ("tests/a.py", "test_b.py", ".hidden/c.py", "venv/d.py", "site-packages/e.py", "pkg/f.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(WRONG)
    main(["--format", "json"])
    assert [each["file"] for each in json.loads(capsys.readouterr().out)] == ["pkg/f.py", "train.py"]
    assert main(["tests/a.py"]) == 1  # what is named is read


def test_a_file_is_read_with_what_it_imports(folder: Path, capsys: Captured) -> None:
    Path("train.py").write_text("from loop import run\nrun(9)\n")
    Path("loop.py").write_text(DDP.replace("        sampler.set_epoch(epoch)\n", "") + "\n\ndef run(n):\n    main()\n")
    assert main(["--format", "json", "loop.py"]) == 1
    assert codes(capsys.readouterr().out) == ["LS101"]
    assert main(["--format", "json", "train.py"]) == 0  # the fault is in a file that was not named
    capsys.readouterr()


HOSTILE = {
    "syntax.py": b"def f(:\n",
    "python2.py": b"print 'x'\n",
    "null.py": b"x = 1\x00\n",
    "latin.py": b"x = '\xe9'\n",
    "unknown.py": b"# -*- coding: no-such -*-\nx = '\xe9'\n",
    "deep.py": b"x = " + b"(" * 3000 + b")" * 3000,
    "unary.py": b"x = " + b"-" * 100_000 + b"1",
    "large.py": b"#" * 1_100_000,
}


def test_a_library_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """A training loop that no script reaches; once alone, once in a file that can be started, once beside a script."""
    monkeypatch.chdir(tmp_path)
    body = "".join(f"        {line}\n" if line else "\n" for line in WRONG.splitlines())
    trainer, starts = f"class Trainer:\n    def fit(self):\n{body}", "\n\nif __name__ == '__main__':\n    print(1)\n"
    Path("package").mkdir()
    Path("package/__init__.py").write_text("from package.trainer import Trainer\n")
    for text, script in [(trainer, ""), (trainer + starts, ""), (trainer, f"from package import Trainer\n{starts}")]:
        Path("package/trainer.py").write_text(text)
        Path("main.py").write_text(script)
        main(["--format", "json"])
        assert codes(capsys.readouterr().out) == ["LS112"]


def test_hostile_files(folder: Path, capsys: Captured) -> None:
    for name, content in HOSTILE.items():
        Path(name).write_bytes(content)
    os.mkfifo("pipe.py")
    Path("broken.py").symlink_to("nowhere")
    Path("circle").mkdir()
    Path("circle/again").symlink_to(Path("circle").absolute())
    assert main(["--format", "json"]) == 1  # what can be read is linted
    captured = capsys.readouterr()
    assert codes(captured.out) == ["LS112"]
    for name in (*HOSTILE, "pipe.py", "broken.py"):
        assert f"lockstep-lint: {name} was not read: " in captured.err
        assert main([name]) == 2
        capsys.readouterr()
    assert "Traceback" not in captured.err


def test_readable_oddities(folder: Path) -> None:
    for name, content in {
        "declared.py": b"# -*- coding: latin-1 -*-\n# \xe9\n" + WRONG.encode(),
        "bom.py": b"\xef\xbb\xbf" + WRONG.encode(),
        "crlf.py": WRONG.replace("\n", "\r\n").encode(),
        "form.py": b"\x0c\n" + WRONG.encode(),
        "long.py": WRONG.encode() + b"x = 0" + b" + 1" * 900,
        "chain.py": WRONG.encode() + b"x = a" + b".b" * 900 + b"\nx.backward()\n",
    }.items():
        Path("train.py").write_bytes(content)
        assert main(["train.py"]) == 1, name
    Path("train.py").write_text("")
    assert main(["train.py"]) == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folders_without_rights(folder: Path) -> None:
    Path("closed").mkdir(mode=0)
    Path("secret.py").write_text(WRONG)
    Path("secret.py").chmod(0)
    assert main([]) == 1
    assert main(["secret.py"]) == 2


def test_names_that_are_not_text(folder: Path) -> None:
    name = os.fsdecode(b"a\xff\x1b[31m\n.py")
    Path(name).write_text(WRONG)
    Path("train.py").unlink()
    for form in ("text", "json", "github", "sarif"):
        command = [sys.executable, "-m", "lockstep_lint", "--format", form]
        ran = subprocess.run(command, capture_output=True, check=False, env=ENVIRONMENT)
        assert (ran.returncode, ran.stderr) == (1, b"")
        assert b"\x1b" not in ran.stdout
    assert printable("a\x1b\u202eb\né") == "a\\x1b\\u202eb\\né"


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    for number in range(300):
        Path(f"train{number}.py").write_text(WRONG)
    command = f"{sys.executable} -m lockstep_lint | head -1"
    ran = subprocess.run(command, shell=True, capture_output=True, check=True, env=ENVIRONMENT)
    assert ran.stdout.startswith(b"train.py:26:16: LS112")
    assert ran.stderr == b""
