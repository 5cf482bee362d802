"""The run folder from outside."""

from pathlib import Path

from lockstep.config.fields import with_values
from lockstep.config.recipes import recipe
from lockstep.distributed.world import World
from lockstep.training.loop import train


def test_what_killed_processes_were_writing_goes_when_a_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    half_written = [tmp_path / ".config.json.7.tmp", *(tmp_path / "weights" / n for n in (".best.7.tmp", ".tmpdLNHZF"))]
    kept = [tmp_path / "notes.txt", tmp_path / "weights" / "mine.tmp"]
    for path in (*half_written, *kept):
        path.write_text("{")
    small = with_values(recipe("digits"), {"epochs": 1, "model": "mlp", "fraction": 0.1})
    train(small, World.single(), tmp_path)
    assert [path.exists() for path in (*half_written, *kept)] == [False, False, False, True, True]
