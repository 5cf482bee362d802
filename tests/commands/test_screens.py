"""What a terminal of 60 or 100 columns shows: no line is wider, in cells, of which a Chinese character takes two."""

import io
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from lockstep import cli
from lockstep.commands.predict import _table
from lockstep.commands.shared.grid import cut
from lockstep.inference.classifier import Answer, Prediction

LINES = [
    *("recipes", "show photos", "runs", "compare --help", "launch-script slurm --help", "doctor --help"),
    *("train mnst", "train --nprocs 2", "train digits --epochs many", "train 花园", "predict", "eval", "report 没有"),
    *("show 花园/没有", "launch-script slurm digits --time 1:00 --nnodes 0", "diff a", "tune digits --rounds 0"),
    "launch-script slurm photos --init none --epochs 1 --image-size 64 --nnodes 0",  # notes before the error
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("line", LINES)
def test_no_line_is_wider_than_the_terminal(
    line: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "花园").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with pytest.raises(SystemExit):
        cli.main(line.split())
    text = screen.getvalue()
    assert text.strip()
    assert [each for each in text.splitlines() if cell_len(each) > columns] == []
    assert "note: --init none" in text or not line.startswith("launch-script slurm photos")


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_predictions_fit_beside_their_paths(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    likely = Prediction(("大船 ship", "飞机", "Hündchen", "pick-up & car"), (0.5, 0.3, 0.15, 0.05))
    paths = ("photo.jpg", "new-pictures/我的照片/飞机和大船 12.jpg", "a" * 90 + ".png")
    answers = [Answer(path, likely) for path in paths]
    screen, file = Terminal(), io.StringIO()
    _table(answers, screen)
    lines = screen.getvalue().splitlines()
    assert len(lines) == len(paths)
    assert max(map(cell_len, lines)) <= columns
    assert len({cell_len(each.partition("大船 ship 5")[0]) for each in lines}) == 1  # where the classes begin
    assert all("大船 ship 50.0%" in each for each in lines)
    _table(answers, file)
    assert [each.split("  ")[0] for each in file.getvalue().splitlines()] == list(paths)
    assert file.getvalue().count("pick-up & car 5.0%") == len(paths)


@pytest.mark.parametrize("text", ["花" * 30, "a" * 30, "a花" * 20, "short"])
@pytest.mark.parametrize("size", [8, 11, 20])
def test_a_text_is_cut_to_its_cells(text: str, size: int) -> None:
    found = cut(text, size)
    assert size - 2 <= cell_len(found) <= size or found == text
    assert found.endswith(text[-1])
