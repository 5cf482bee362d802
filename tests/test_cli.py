"""The command line: what it prints, what it takes, and that it is one program however it is started."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import sys
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import lockstep
from lockstep import cli
from lockstep.__main__ import main as start
from lockstep.commands import COMMANDS, train
from lockstep.config import Config, Execution
from lockstep.config.changes import changed
from lockstep.config.execution import Evaluation
from lockstep.config.fields import flag_names, with_values
from lockstep.config.flags import parse_words
from lockstep.config.recipes import RECIPES, recipe
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.models import build
from lockstep.training.evaluation import Metrics
from tests.configs import flags_of_command
from tests.journals import read
from tests.ranks import run_ranks
from tests.subprocesses import Command, run_lockstep


def said(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """Standard output of a command that succeeds."""
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    out, err = capsys.readouterr()
    assert (end.value.code, err) == (0, "")
    return out


def test_help_names_every_command_and_each_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help")
    assert said(capsys, "") == said(capsys, "help") == said(capsys, "-h") == text
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    assert re.findall(r"^(.+):$", text, re.MULTILINE) == [*groups, "examples"]
    found = re.findall(r"^  ([\w-]+)  +\w", text.partition("examples:")[0], re.MULTILINE)
    assert found == sorted(COMMANDS, key=lambda name: [*groups].index(COMMANDS[name].group))
    versions = f"{lockstep.__version__} (torch {version('torch')}, torchvision {version('torchvision')})"
    assert said(capsys, "--version") == f"lockstep {versions}\n"
    for name in found:
        if name != "lint":  # a program of its own
            assert said(capsys, f"{name} --help").startswith(f"usage: lockstep {name}")
            assert said(capsys, f"help {name}") == said(capsys, f"{name} --help")


def test_every_example_of_the_help_is_understood() -> None:
    own = [f"lockstep {example}" for command in COMMANDS.values() for example in command.examples]
    examples = [*cli._EXAMPLES, *own]
    assert len(examples) > 30
    for line in examples:
        words = line.partition("lockstep ")[2].partition(" > ")[0].split()
        names = words[1:2] if words[0] == "launch-script" else []
        flags = flags_of_command(" ".join([words[0], *names]))
        script = COMMANDS[words[0]].arguments.startswith("[FLAGS] SCRIPT")
        parse_words(words[1:], flags, script)


@pytest.mark.parametrize(
    ("given", "left"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "a"}, "-")]
)
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(
    given: dict[str, str], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os; from lockstep.cli import _exit_code, main\n"
    program += "try: main(['recipes'])\nfinally: print(os.environ.get('GOMP_SPINCOUNT', '-'))"
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    ended = Command(sys.executable, "-c", program, env=given).end(timeout=60)
    assert ended.out.splitlines()[-1] == left


def test_texts_hash_alike_in_every_start_of_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a set of class names has one order, whichever process asks."""
    (tmp_path / "start.py").write_text(
        "import sys, types\n"
        "sys.modules['lockstep.cli'] = types.SimpleNamespace(main=lambda: print(hash('text')))\n"
        "from lockstep.__main__ import main\n"
        "main()\n"
    )

    def hashed(word: str, **env: str) -> str:
        ended = Command(sys.executable, "start.py", word, cwd=tmp_path, env=env).end()
        assert ended.code == 0, ended.text
        return ended.out

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert hashed("train") == hashed("verify") == hashed("train", PYTHONHASHSEED="0")
    assert hashed("train", PYTHONHASHSEED="7") == hashed("recipes", PYTHONHASHSEED="7") != hashed("train")
    assert hashed("recipes") != hashed("recipes")


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "recipes").splitlines()  # a recipe's name, or what goes on from the line above
    assert [line.split()[0] for line in lines if line[2] != " "] == list(RECIPES)
    for name in RECIPES:
        text = said(capsys, f"show {name}")
        assert text.startswith("# ")
        assert f"\nlockstep train {name} \\\n" in text
        words = [word for word in text.partition("\nlockstep train ")[2].split() if word != "\\"]
        typed = parse_words(words[1:], flag_names(Config)).values
        assert with_values(recipe(name), changed(recipe(name), typed)[0]) == recipe(name)
        assert text.count("\n") < 40
    assert said(capsys, "show") == said(capsys, "show digits")


def test_the_command_that_is_shown_of_a_run_has_what_the_recipe_has_and_the_run_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = recipe("photos")
    config = with_values(base, changed(base, {"init": "", "cache": "", "epochs": 3})[0])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    text = said(capsys, f"show {tmp_path}")
    words = [word for word in text.partition("\nlockstep train ")[2].split() if word != "\\"]
    typed = parse_words(words[1:], flag_names(Config)).values
    assert with_values(base, changed(base, typed)[0]) == config


def test_one_program_however_it_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = entry_points(group="console_scripts", name="lockstep")
    assert script.load() is start
    ended = run_lockstep("--help", cwd=tmp_path, fresh=True)
    assert (ended.code, ended.out, ended.err) == (0, said(capsys, "--help"), "")
    beside = shutil.which("lockstep", path=str(Path(sys.executable).parent))
    if beside:
        assert Command(beside, "--help").end().out == ended.out


@pytest.mark.parametrize(
    "start", ["runpy.run_module('lockstep', run_name='__main__')", "import lockstep; lockstep.launch"]
)
def test_windows_gets_one_line_that_names_wsl(start: str, tmp_path: Path) -> None:
    # what Python lacks there: an import of any of these would end in a traceback
    posix = ("fcntl", "pty", "pwd", "resource", "termios")
    program = f"""
import runpy, signal, sys
sys.argv = ["lockstep", "recipes"]
sys.modules.update(dict.fromkeys({posix}))
del signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.pthread_sigmask
sys.platform = "win32"
try:
    {start}
except ImportError as error:
    sys.exit(f"ImportError: {{error}}")
"""
    ended = Command(sys.executable, "-c", program, cwd=tmp_path).end()
    assert (ended.code, ended.out) == (1 if "launch" in start else 2, "")
    (line,) = ended.err.splitlines()
    assert "inside WSL2" in line


def test_a_user_s_own_recipe_and_flags_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_recipes.py").write_text(
        "from lockstep import Config\ndef quick():\n    return Config(epochs=1, batch_size=32)\n"
    )
    monkeypatch.chdir(tmp_path)
    seen: list[Config] = []

    def launched(fn: object, config: Config, *args: object, **how: object) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(train, "launched", launched)
    for line in ("train my_recipes:quick --seed 7", "train --seed 7 my_recipes:quick"):
        with pytest.raises(SystemExit) as end:
            cli.main([*line.split(), "--nproc", "1"])
        assert end.value.code == 0
    assert (
        seen[0]
        == seen[1]
        == Config(recipe="my_recipes:quick", epochs=1, seed=7, execution=Execution(nproc=1), batch_size=32)
    )
    assert not (tmp_path / "runs").is_dir() or not list((tmp_path / "runs").iterdir())  # no run came of it


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two processes, by the real command."""
    folder = tmp_path_factory.mktemp("cli")
    ended = run_lockstep(
        *["train", "digits", "--nproc", "2", "--epochs", "2", "--batch-size", "100", "--log", "csv", "--out", "run"],
        cwd=folder,
        timeout=120,
    )
    assert (ended.code, ended.err, ended.orphans) == (0, "", ()), ended.text
    assert ended.out.count("test accuracy") == 1
    assert ended.out.rstrip().endswith("run folder    run")
    return folder / "run"


def test_a_run_leaves_a_whole_folder(trained: Path) -> None:
    records = read(trained / "journal.jsonl")
    assert [records[0]["kind"], records[-1]["kind"]] == ["run", "end"]
    assert records[-1]["status"] == "completed"
    assert records[-1]["processes"] == 2
    assert Config.from_dict(json.loads((trained / "config.json").read_text())).epochs == 2
    assert (trained / "metrics.csv").is_file()
    assert {p.name for p in (trained / "weights").iterdir()} == {"best.safetensors", "final.safetensors"}


def evaluated(world: World, folder: str) -> str:
    from lockstep.training.run_folder import evaluate_run, read_config

    with contextlib.redirect_stdout(io.StringIO()) as out:
        evaluate_run(world, read_config(folder, trust_code=False), folder, Evaluation(weights="final"))
    return out.getvalue()


def test_eval_repeats_the_last_evaluation_on_any_number_of_processes(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = [record for record in read(trained / "journal.jsonl") if record["kind"] == "eval"][-1]
    metrics = Metrics(**{field.name: last[field.name] for field in dataclasses.fields(Metrics) if field.name in last})
    expected = said(capsys, f"eval {trained} --weights final --nproc 1")
    first, by_class, end = expected.split("\n")
    assert (first, end) == (f"final weights of {trained}: {metrics}", "")
    assert re.fullmatch(
        r"mean over classes: precision .*  recall .*  F1 .* \(lowest: .*\); calibration error .*%", by_class
    )
    assert run_ranks(evaluated, 3, str(trained)) == [expected, "", ""]


def test_weights_say_what_an_answer_means(trained: Path, tmp_path: Path) -> None:
    from lockstep.checkpoint import weights

    final = trained / "weights" / "final.safetensors"
    note = weights.read_metadata(final)
    assert json.loads(note["classes"]) == [str(digit) for digit in range(10)]
    assert len(json.loads(note["mean"])) == len(json.loads(note["std"])) == 1
    other = tmp_path / "run"
    shutil.copytree(trained, other)
    note = {"classes": json.dumps([str(digit) for digit in range(9, -1, -1)])}
    model = build("digits_net", in_channels=1, num_classes=10, image_size=8)
    weights.load(model, final)
    weights.save(model, other / "weights" / "final.safetensors", note)
    with pytest.raises(UserError, match="was trained on other classes than"):
        evaluated(World.single(), str(other))


def test_eval_by_the_real_command(trained: Path) -> None:
    last = [record for record in read(trained / "journal.jsonl") if record["kind"] == "eval"][-1]
    ended = run_lockstep("eval", "--nproc", "2", "run", cwd=trained.parent)
    assert ended.code == 0, ended.text
    assert ended.out.startswith("best weights of run: top-1 ")
    assert f"({last['count']:,} images)" in ended.out
