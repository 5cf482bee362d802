"""The loggers hold the journal's numbers, read back from their own formats."""

import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.errors import UserError
from lockstep.monitoring.journal import EvalRecord, Journal, Record, read
from lockstep.monitoring.loggers import open_loggers
from tests.monitoring.test_journal import EVAL
from tests.monitoring.test_journal import step as a_step


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test where a package is missing."""
    why = f"{name} is not installed: pip install '.[{name}]'"
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=why)


def write(folder: Path, *names: str) -> None:
    """A small run's journal, and its loggers."""
    journal = Journal(folder / "journal.jsonl", open_loggers(names, folder, {"epochs": 2}))
    journal.write(cast(Record, {"kind": "run", "config": {"epochs": 2}}))
    for epoch in range(2):
        for step in range(10 * epoch + 5, 10 * epoch + 11, 5):
            journal.write(a_step(step, epoch=epoch, loss=1 / step, comm_wait_ms=0.0))
        own = {"epoch": epoch, "step": 10 * epoch + 10, "top1": 0.5 + epoch / 4, "macro_f1": 0.5 + epoch / 8}
        journal.write(cast(EvalRecord, {**EVAL, **own}))
    journal.write(cast(Record, {"kind": "end", "status": "completed", "top1": 0.75}))
    journal.close()


def records(log: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    position, parts = 7, b""
    while position < len(log):
        if (left := 2**15 - position % 2**15) < 7:  # a block's end that no header fits into
            position += left
            continue
        length, kind = int.from_bytes(log[position + 4 : position + 6], "little"), log[position + 6]
        parts += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def numbers(folder: Path, kind: str, field: str) -> list[tuple[int, float]]:
    records: list[Any] = read(folder / "journal.jsonl")
    return [(r["step"], r[field]) for r in records if r["kind"] == kind]


def test_csv(tmp_path: Path) -> None:
    write(tmp_path, "csv")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for kind, field in [("step", "loss"), ("step", "images_per_s"), ("eval", "top1"), ("eval", "loss")]:
        found = [(int(row["step"]), float(row[field])) for row in rows if row["kind"] == kind]
        assert found == numbers(tmp_path, kind, field)
        assert [float(row["time"]) for row in rows if row["kind"] == kind] == [
            t for _, t in numbers(tmp_path, kind, "time")
        ]
    write(tmp_path, "csv")  # a resumed run appends, under one header
    assert (tmp_path / "metrics.csv").read_text().count("kind") == 1


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf's own
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "train/images_per_s", "eval/top1", "eval/top5", "eval/loss"} <= set(
        events.Tags()["scalars"]
    )
    for kind, prefix in (("step", "train"), ("eval", "eval")):
        found = [(event.step, event.value) for event in events.Scalars(f"{prefix}/loss")]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in numbers(tmp_path, kind, "loss")]


@needs("wandb")
@pytest.mark.filterwarnings("ignore")  # of its own dependencies
def test_wandb_offline_keeps_everything_under_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_DIR", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path, "wandb")
    (log,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    rows = []
    for raw in records(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            rows.append((record.history.step.num, {i.nested_key[0]: i.value_json for i in record.history.item}))
    for kind, field, key in [("step", "loss", "train/loss"), ("eval", "top1", "eval/top1")]:
        found = [(step, float(row[key])) for step, row in rows if key in row]
        assert found == numbers(tmp_path, kind, field)
    write(tmp_path, "wandb")  # where it goes on: the same run to whoever syncs it
    assert len({path.name for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")}) == 1


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # of its own dependencies
def test_mlflow_keeps_one_run_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(tmp_path, "mlflow")
    write(tmp_path, "mlflow")  # it goes on
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = (e for e in client.search_experiments() if e.name == "lockstep")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params["epochs"] == "2"
    for kind, field, key in [("step", "loss", "train/loss"), ("eval", "macro_f1", "eval/macro_f1")]:
        found = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]
        assert sorted(found) == sorted(numbers(tmp_path, kind, field))


@needs("trackio")
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_one_run_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # before its import, which reads it
    write(tmp_path, "trackio")
    write(tmp_path, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert list((tmp_path / "trackio").glob("lockstep*.db"))
    rows = SQLiteStorage.get_logs("lockstep", tmp_path.name)
    for kind, field, key in [("step", "loss", "train/loss"), ("eval", "macro_f1", "eval/macro_f1")]:
        found = [(row["step"], row[key]) for row in rows if key in row]
        assert sorted(found) == sorted(numbers(tmp_path, kind, field))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_package_that_is_missing_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("lockstep.monitoring.loggers.importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        open_loggers(("csv", name), tmp_path, {})
    assert f"--log {name}" in caught.value.message
    assert f"pip install 'lockstep-torch[{name}]'" in caught.value.remedy
    assert not list(tmp_path.iterdir())
