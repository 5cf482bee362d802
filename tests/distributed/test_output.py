"""Output that breaks ends no training, and is noted in the journal; it fails a command whose product it is."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from rich.cells import cell_len

from lockstep.distributed.output import for_people, take_broken, unbreakable_output
from tests.subprocesses import Command


@contextmanager
def broken(how: str) -> Iterator[int]:
    """A descriptor that nothing can be written to."""
    if how == "a full disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        yield out
    finally:
        os.close(out)


def train(folder: Path, nproc: str, stdout: int | None = None) -> None:
    arguments = f"train --fraction 0.1 --epochs 2 --nproc {nproc} --threads 1 --out run".split()
    ended = Command(sys.executable, "-m", "lockstep", *arguments, cwd=folder, stdout=stdout, warm=True).end()
    assert (ended.code, ended.err, ended.orphans) == (0, "", ()), ended.text


@pytest.mark.parametrize(("how", "nproc"), [("a pipe without a reader", "2"), ("a full disk", "1")])
def test_training_goes_on_without_its_output(tmp_path: Path, how: str, nproc: str) -> None:
    with broken(how) as out:
        train(tmp_path, nproc, out)
    records = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").read_text().splitlines()]
    assert records[-1]["status"] == "completed"
    (told,) = [record for record in records if record["kind"] == "fault"]
    assert told["fault"] == "output"
    assert told["cause"] in ("<stdout>: Broken pipe", "<stdout>: No space left on device")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [20, 60])
def test_lines_break_between_words_where_a_terminal_would_break_inside_them(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = f"{'of the classes 郁金香 and daisy, ' * 5}\n\n  a remedy longer than a line goes on below it"
    lines = for_people(text, Terminal()).split("\n")
    assert max(map(cell_len, lines)) <= columns
    assert {word for line in lines for word in line.split()} == set(text.split())
    assert all(line.startswith("  ") for line in lines[lines.index("") + 1 :])
    assert for_people(text, io.StringIO()) == text


# each prints a product: what is lost of it is no success
PRODUCTS = [
    *("--help", "recipes", "show photos", "launch-script torchrun", "preview digits --views 1"),
    *("eval run", "runs .", "report run --no-pictures", "export run", "diff run run2", "watch run --once"),
    *(f"predict run pictures {flags}" for flags in ("--format csv", "--format jsonl", "--nproc 2")),
]
CASES = [(command, "a full disk") for command in PRODUCTS] + [
    (command, "a pipe without a reader") for command in ("recipes", "runs .", "predict run pictures --nproc 2")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "pictures").mkdir()
    train(folder, "1")
    shutil.copytree(folder / "run", folder / "run2")
    for k in range(300):
        Image.new("L", (8, 8), k % 256).save(folder / f"pictures/{k:03}.png")
    return folder


@pytest.mark.parametrize(("command", "how"), CASES)
def test_a_product_that_can_t_be_written_is_a_failure(command: str, how: str, runs: Path) -> None:
    with broken(how) as out:
        words = command.split()
        ended = Command(sys.executable, "-m", "lockstep", *words, cwd=runs, stdout=out, warm=True).end()
    (runs / "run-best.safetensors").unlink(missing_ok=True)
    assert ended.code == 2, ended.text
    assert "standard output ended: " in ended.err, ended.text
    assert "at least 0 bytes were written, and the rest is lost" in ended.err, ended.text
    assert "Traceback" not in ended.err, ended.text
    assert not ended.orphans


def test_how_much_was_written_is_said(runs: Path) -> None:
    """On a disk with room for some rows alone, by a limit on the size of files."""
    script = "ulimit -f 8; exec python -m lockstep predict run pictures --workers 0 --format csv > rows.csv"
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=runs, env=env, capture_output=True, timeout=120, check=False, text=True
    )
    size = (runs / "rows.csv").stat().st_size
    assert (done.returncode, size) == (2, 8 * 1024), done.stderr
    assert f"at least {size:,} bytes were written" in done.stderr


def test_only_what_breaks_is_turned_off(capsys: pytest.CaptureFixture[str]) -> None:
    with unbreakable_output():
        print("here")
        print("there", file=sys.stderr)
    assert capsys.readouterr() == ("here\n", "there\n")
    assert take_broken() == ""
