"""A run's story as its journal tells it."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep import recipe
from lockstep.processes.world import World
from lockstep.training.loop import train
from lockstep.watch.journal import Record, read


def journal_of(folder: Path, epochs: int, eval_every: int) -> list[Record]:
    config = recipe("digits")
    config = replace(
        config,
        epochs=epochs,
        tta="mirror",
        data=replace(config.data, fraction=0.1, alternate_flip=True),
        execution=replace(config.execution, eval_every=eval_every, log_every=2),
        recovery=replace(config.recovery, checkpoint_every="0"),
    )
    (folder / "weights").mkdir(parents=True)
    train(config, World.single(), folder)
    return read(folder / "journal.jsonl")


@pytest.mark.parametrize(("every", "evaluated"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (9, [4])])
def test_every_so_many_epochs_and_the_last_are_evaluated(tmp_path: Path, every: int, evaluated: list[int]) -> None:
    records = journal_of(tmp_path, 5, every)
    assert [r["epoch"] for r in records if r["kind"] == "eval"] == evaluated
    steps = [r for r in records if r["kind"] == "step"]
    assert sorted({r["epoch"] for r in steps}) == [0, 1, 2, 3, 4]
    end = records[-1]
    assert (end["status"], end["steps"]) == ("completed", steps[-1]["step"])
    assert end["top1"] == [r["top1"] for r in records if r["kind"] == "eval"][-1]
    assert [r["comm_wait_ms"] for r in steps] == [0.0] * len(steps)
    assert len(end["peak_memory_gib"]) == 1
    assert 0.1 < end["peak_memory_gib"][0] < 24
    weights = {every: journal_of(tmp_path / "again", 5, 1)[-1]["weights_sha256"], 0: end["weights_sha256"]}
    assert len(set(weights.values())) == 1, "evaluating more often changes nothing that is learned"
