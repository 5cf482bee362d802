"""Copies of the journal's numbers in other formats: CSV, TensorBoard, Weights & Biases, MLflow, trackio.

A mirror is two functions: to write a record with numbers, and to close, told how the run ended. Where a run goes on,
so do its mirrors: the id that a tracker gave it stays in the run folder.
"""

import csv
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.processes.files import write_text
from lockstep.watch.records import EvalRecord, Mirror, Record, StepRecord

Numbers = StepRecord | EvalRecord
Writer = tuple[Callable[[Numbers], object], Callable[[str], object]]  # to write a record; to close, given the status

_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
_CSV_COLUMNS = (
    "time", "kind", "epoch", "step", "samples", "loss", "lr", "images_per_s", "data_wait_ms", "comm_wait_ms", "top1",
    "top5", "count", "macro_precision", "macro_recall", "macro_f1", "calibration_error",
)  # fmt: skip


def check(names: tuple[str, ...]) -> None:
    """Raise UserError where a mirror's package is not installed. Imports nothing."""
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(name) is None:
            remedy = f"pip install 'lockstep-torch[{name}]'"
            raise UserError(f"--log {name}: the package {name} is not installed", remedy)


def open_mirrors(names: tuple[str, ...], folder: Path, config: dict[str, Any]) -> tuple[Mirror, ...]:
    """The mirrors named by `--log`, writing under the run folder.

    Raises:
        UserError: where a mirror's package is not installed, or W&B has no account to send to.
    """
    check(names)
    makers = {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    return tuple(_mirror(*makers[name](folder, config)) for name in names)


def _mirror(write: Callable[[Numbers], object], close: Callable[[str], object]) -> Mirror:
    """A mirror of the records with numbers, closed by the `end` record."""

    def mirror(record: Record) -> None:
        if record["kind"] == "step" or record["kind"] == "eval":
            write(record)
        elif record["kind"] == "end":
            close(record["status"])

    return mirror


def _named(record: Numbers) -> dict[str, float]:
    """The numbers by the names that they have in TensorBoard and W&B."""
    prefix = "train" if record["kind"] == "step" else "eval"
    places = ("time", "step", "epoch")
    return {f"{prefix}/{k}": v for k, v in record.items() if isinstance(v, (int, float)) and k not in places}


def _csv(folder: Path, _: dict[str, Any]) -> Writer:
    file = (folder / "metrics.csv").open("a", newline="", buffering=1, encoding="utf-8")
    writer = csv.DictWriter(file, _CSV_COLUMNS, extrasaction="ignore")
    if file.tell() == 0:
        writer.writeheader()
    return writer.writerow, lambda _: file.close()


def _tensorboard(folder: Path, _: dict[str, Any]) -> Writer:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(record: Numbers) -> None:
        for name, value in _named(record).items():
            writer.add_scalar(name, value, record["step"])

    return write, lambda _: writer.close()


def _wandb(folder: Path, config: dict[str, Any]) -> Writer:
    import wandb

    kept = folder / "wandb-run.txt"
    try:
        # WANDB_MODE=offline keeps everything under the run folder; `wandb sync` sends it later
        run = wandb.init(
            project="lockstep", dir=str(folder), config=config, name=folder.name, id=_kept(kept) or None, resume="allow"
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"--log wandb: {error}", "Log in with `wandb login`, or keep the run here with WANDB_MODE=offline."
        ) from error
    write_text(kept, run.id)
    return lambda record: run.log(_named(record), step=record["step"]), lambda _: run.finish()


def _mlflow(folder: Path, config: dict[str, Any]) -> Writer:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    kept = folder / "mlflow-run.txt"
    # a database in the run folder, unless MLFLOW_TRACKING_URI names a server or another one
    where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    client, run = MlflowClient(tracking_uri=where), _kept(kept)
    if run:
        client.update_run(run, status="RUNNING")
    else:
        found = client.get_experiment_by_name("lockstep")
        experiment = found.experiment_id if found else client.create_experiment("lockstep")
        run = client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in _flat(config)]
        for start in range(0, len(params), 100):  # as many as it takes at once
            client.log_batch(run, params=params[start : start + 100])
        write_text(kept, run)

    def write(record: Numbers) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, metrics=[Metric(k, v, now, record["step"]) for k, v in _named(record).items()])

    ends = {"completed": "FINISHED", "interrupted": "KILLED"}
    return write, lambda status: client.set_terminated(run, ends.get(status, "FAILED"))


def _trackio(folder: Path, config: dict[str, Any]) -> Writer:
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when it is imported
    import trackio

    run = trackio.init(
        project="lockstep", name=folder.name, config=config, resume="allow", embed=False, auto_log_gpu=False,
        auto_log_cpu=False,
    )  # fmt: skip
    return lambda record: run.log(_named(record), step=record["step"]), lambda _: run.finish()


def _kept(path: Path) -> str:
    """The id that a tracker gave the run when it began; empty for a new run."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _flat(values: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Names and values of a nested config, as optim.lr."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{before}{name}.") if isinstance(value, dict) else [(f"{before}{name}", value)]
    return flat
