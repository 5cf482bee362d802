"""`lockstep lint` as a user types it: exit codes, formats, what is left out, and what --fix writes."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.commands.lint.check import check
from lockstep.commands.lint.command import main
from lockstep.commands.lint.fixes import applied, fix
from lockstep.commands.lint.program import Program
from lockstep.commands.lint.rule import RULES, Edit, Hit
from lockstep.errors import UserError
from tests.lint.mutations import WRONG
from tests.lint.test_rules import EVERY, HERE, mutated

ROOT = HERE.parents[1]
FAULTY = "import torch\n\nstate = torch.load('a.pt', weights_only=False)  # é\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    path = tmp_path / "script.py"
    path.write_text(FAULTY)
    return path


def test_exit_codes(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(script)]) == 1
    out = capsys.readouterr().out
    assert f"{script}:3:9: LS405 a file is unpickled, and not as weights alone" in out
    assert out.endswith("\n\n1 finding in 1 file\n")
    assert [line.strip().partition(":")[0] for line in out.splitlines()[1:4]] == ["result", "why", "mend"]
    script.write_text("print(1)\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 findings in 1 file\n"
    script.write_text("def (:\n")
    assert main([str(script)]) == 2
    assert "is no Python" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 0, "a folder may hold such a file"
    for wrong in ([], ["no_such.py"], [str(script), "--format", "xml"], [str(script), "--select", "LS9"]):
        with pytest.raises(UserError):
            main(wrong)


def test_json_sarif_and_github_say_the_same(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(script), "--format", "json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["code"], found["line"], found["column"], found["file"]) == ("LS405", 3, 9, str(script))
    assert main([str(script), "--format", "sarif"]) == 1
    report = json.loads(capsys.readouterr().out)
    (run,) = report["runs"]
    (result,) = run["results"]
    assert report["version"] == "2.1.0"
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "LS405"
    region = result["locations"][0]["physicalLocation"]["region"]
    assert (region["startLine"], region["startColumn"]) == (3, 9)
    assert main([str(script), "--format", "github"]) == 1
    line = capsys.readouterr().out
    assert line.startswith(f"::warning file={script},line=3,endLine=3,col=9,title=LS405 ")
    assert line.count("\n") == 1, "newlines are escaped"
    script.write_text("")
    for style in ("json", "sarif"):
        assert main([str(script), "--format", style]) == 0
        json.loads(capsys.readouterr().out)


def test_select_ignore_and_the_table(script: Path, tmp_path: Path) -> None:
    assert main([str(script), "--select", "LS4"]) == 1
    assert main([str(script), "--select", "pickle-load"]) == 1
    assert main([str(script), "--select", "LS1,LS2"]) == 0
    assert main([str(script), "--ignore", "LS405"]) == 0
    table = tmp_path / "pyproject.toml"
    table.write_text('[tool.lockstep.lint]\nignore = ["LS405"]\n')
    assert main([str(script)]) == 0
    table.write_text('[tool.lockstep.lint]\nselect = ["LS1"]\n')
    assert main([str(script)]) == 0
    assert main([str(script), "--select", "LS4"]) == 1, "the command line goes before the table"
    for wrong in (
        "[tool.lockstep.lint]\nignored = []\n",
        "[tool.lockstep]\nlint = 3\n",
        "[tool.lockstep.lint]\nselect = 3\n",
        "[",
    ):
        table.write_text(wrong)
        with pytest.raises(UserError, match=r"pyproject\.toml"):
            main([str(script)])


def test_imports_of_local_files_are_followed_and_told_once(tmp_path: Path) -> None:
    text = mutated("torchrun", "        sampler.set_epoch(epoch)\n", "")
    tree = ast.parse(text)
    at = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main").lineno - 1
    start = next(node for node in tree.body if isinstance(node, ast.ClassDef)).lineno - 1
    lines = text.splitlines(keepends=True)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .steps import Net, evaluate, seed_worker, train\n")
    (tmp_path / "parts" / "steps.py").write_text("".join(lines[:at]))
    main_file = tmp_path / "train.py"
    main_file.write_text("".join([*lines[:start], "from parts import *\n" * 0,
                                  "from parts import Net, evaluate, seed_worker, train\n", *lines[at:]]))  # fmt: skip
    found, _ = check(sorted(tmp_path.rglob("*.py")), EVERY)
    assert [(each.code, each.path.name) for each in found] == [("LS101", "train.py")]
    steps = tmp_path / "parts" / "steps.py"
    steps.write_text(steps.read_text().replace("    model.eval()\n", ""))
    found, _ = check(sorted(tmp_path.rglob("*.py")), EVERY)
    assert {(each.code, each.path.name) for each in found} == {("LS101", "train.py"), ("LS214", "steps.py")}
    assert {each.code for each in check([main_file], EVERY)[0]} == {"LS101"}, "only files that were asked for"


def test_a_place_is_told_once_with_all_that_is_known_of_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text(FAULTY + FAULTY.replace("'a.pt'", "'b.pt'"))

    def find(program: Program) -> Iterator[Hit]:
        first, second = (program.sources[0].tree.body[i] for i in (1, 3))
        yield from (Hit(first), Hit(first, "read before"), Hit(first, "read after"), Hit(second))

    monkeypatch.setitem(RULES, "LS405", replace(RULES["LS405"], find=find))
    found, _ = check([script], frozenset({"LS405"}))
    assert [(each.line, each.detail) for each in found] == [(3, "read after"), (3, "read before"), (6, "")]


def fixable() -> list[tuple[str, str, str, str]]:
    codes = ("LS201", "LS215", "LS305", "LS314", "LS402", "LS403")
    return [each for each in WRONG if each[1] in codes]


@pytest.mark.parametrize(
    ("script", "code", "old", "new"), fixable(), ids=lambda value: value if len(value) < 12 else ""
)
def test_a_fix_is_python_and_mends(script: str, code: str, old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(mutated(script, old, new))
    found, _ = check([path], EVERY)
    mendable = [each for each in found if each.edits]
    left = fix(found)
    after, broken = check([path], EVERY)
    assert not broken
    assert len(after) <= len(left)
    assert not mendable or code not in {each.code for each in after}


def test_fix_keeps_comments_and_counts_bytes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_bytes("import torch, os\r\ns = 'é'; os.environ['MASTER_PORT'] = '1'  # why\r\n".encode())
    assert main([str(script), "--fix"]) == 0
    assert (
        script.read_bytes().decode()
        == "import torch, os\r\ns = 'é'; os.environ.setdefault(\"MASTER_PORT\", '1')  # why\r\n"
    )
    assert "1 of 1 findings mended" in capsys.readouterr().err
    assert main([str(script), "--fix"]) == 0
    assert applied(b"ab\ncd", [Edit(2, 1, 2, 1, "x"), Edit(1, 0, 1, 1, "")]) == b"b\ncxd"


def test_the_script_of_the_pages_has_the_faults_that_it_counts() -> None:
    """Faults 1 to 9 of mnist_before.py, as its comments count them, and those of cifar10_before.py."""
    found, _ = check([ROOT / "examples/coming_from/mnist_before.py"], EVERY)
    expected = {"LS310", "LS204", "LS104", "LS208", "LS211", "LS108", "LS101", "LS403"}
    assert {each.code for each in found} == expected
    found, _ = check([ROOT / "examples/coming_from/cifar10_before.py"], EVERY)
    assert {each.code for each in found} == {"LS305", "LS104", "LS108", "LS107", "LS101", "LS310", "LS204"}
    names = "mnist_mended", "cifar10_mended", "accelerate_before", "lightning_before"
    mended = [ROOT / f"examples/coming_from/{name}.py" for name in names]
    assert check(mended, EVERY) == ([], [])


def test_findings_in_the_course_and_the_examples() -> None:
    """The wrong ways that stand behind a flag, and what step 3 and 4 leave for step 6."""
    found, broken = check(sorted((ROOT / "examples").rglob("*.py")), EVERY)
    assert not broken
    assert {(each.path.name, each.code) for each in found if not each.path.name.endswith("_before.py")} == {
        ("03-ddp-torchrun.py", "LS101"),
        ("04-ddp-spawn.py", "LS101"),
        ("04-ddp-spawn.py", "LS305"),
        ("09-accumulation.py", "LS312"),
        ("ddp_no_sync.py", "LS312"),
        ("ddp_unused.py", "LS313"),
    }


def test_the_list_of_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rules"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == sorted(RULES)


def test_a_rule_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "LS4,no-set-epoch"]) == 0
    out = capsys.readouterr().out
    assert [line[:5] for line in out.splitlines() if line.startswith("LS")] == [
        "LS101",
        *sorted(c for c in RULES if "S4" in c),
    ]
    for code in ("LS101", "LS405"):
        words = "".join(out[out.index(code) :].split())
        for told in (RULES[code].title, RULES[code].result, RULES[code].mend, RULES[code].find.__doc__ or ""):
            assert "".join(told.split()) in words
    with pytest.raises(UserError, match="no rule has the code 'LS9'"):
        main(["--explain", "LS9"])


def test_lint_imports_no_torch(script: Path) -> None:
    program = (
        "import sys\nfrom lockstep.cli import main\ntry:\n    main(['lint', sys.argv[1]])\n"
        "except SystemExit as end:\n    assert end.code == 1\nassert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(script)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("page", ["docs/lint.md", "docs/zh/lint.md"])
def test_the_page_lists_the_rules_as_they_are(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rules"])
    text = (ROOT / page).read_text()
    assert f"```\n{capsys.readouterr().out}```" in text
    table = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])["tool"]["lockstep"]["lint"]
    assert set(table) == {"select", "ignore"}
    assert all(any(code.startswith(prefix) for code in RULES) for prefix in table["select"] + table["ignore"])
