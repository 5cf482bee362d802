"""Copies of the journal's numbers in other formats: CSV, TensorBoard, Weights & Biases, MLflow, trackio.

A logger is two functions: one writes a record with numbers, the other closes it with the run's status. Where a run
goes on, so do its loggers: the id that a tracker gave it stays in the run folder.
"""

import csv
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.distributed.files import write_text
from lockstep.errors import UserError, shown
from lockstep.monitoring.journal import EvalRecord, Logger, Record, StepRecord

Numbers = StepRecord | EvalRecord
Writer = tuple[Callable[[Numbers], object], Callable[[str], object]]  # to write a record; to close, by the status

_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
_CSV_COLUMNS = (
    "time", "kind", "epoch", "step", "samples", "loss", "lr", "images_per_s", "data_wait_ms", "comm_wait_ms", "top1",
    "top5", "count", "macro_precision", "macro_recall", "macro_f1", "calibration_error", "map",
)  # fmt: skip


def check(names: tuple[str, ...]) -> None:
    """Raise UserError where a logger's package is not installed. Imports nothing."""
    for name in names:
        if name in _PACKAGES and importlib.util.find_spec(name) is None:
            remedy = f"pip install 'lockstep-torch[{name}]'"
            raise UserError(f"--log {name}: the package {name} is not installed", remedy)


def open_loggers(names: tuple[str, ...], folder: Path, config: dict[str, Any]) -> tuple[Logger, ...]:
    """The loggers that `--log` names, in the run folder. Raises UserError where a package or an account is missing."""
    check(names)
    makers = {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
    return tuple(_logger(*makers[name](folder, config)) for name in names)


def _logger(write: Callable[[Numbers], object], close: Callable[[str], object]) -> Logger:
    def log(record: Record) -> None:
        if record["kind"] == "step" or record["kind"] == "eval":
            write(record)
        elif record["kind"] == "end":
            close(record["status"])

    return log


def _tagged(record: Numbers) -> dict[str, float]:
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
        for name, value in _tagged(record).items():
            writer.add_scalar(name, value, record["step"])

    return write, lambda _: writer.close()


def _wandb(folder: Path, config: dict[str, Any]) -> Writer:
    import wandb

    id_file = folder / "wandb-run.txt"
    same = {"id": _read_id(id_file) or None, "resume": "allow"}
    try:
        # WANDB_MODE=offline keeps everything under the run folder; `wandb sync` sends it later
        run = wandb.init(project="lockstep", dir=str(folder), config=config, name=shown(folder.name), **same)
    except wandb.errors.Error as error:
        remedy = "Log in with `wandb login`, or keep the run here with WANDB_MODE=offline."
        raise UserError(f"--log wandb: {error}", remedy) from error
    write_text(id_file, run.id)
    return lambda record: run.log(_tagged(record), step=record["step"]), lambda _: run.finish()


def _mlflow(folder: Path, config: dict[str, Any]) -> Writer:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    id_file = folder / "mlflow-run.txt"
    # a database in the run folder, unless MLFLOW_TRACKING_URI names a server or another one
    where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    client, run = MlflowClient(tracking_uri=where), _read_id(id_file)
    if run:
        client.update_run(run, status="RUNNING")
    else:
        found = client.get_experiment_by_name("lockstep")
        experiment = found.experiment_id if found else client.create_experiment("lockstep")
        run = client.create_run(experiment, run_name=shown(folder.name)).info.run_id
        groups = [("", config), *((f"{name}.", value) for name, value in config.items() if isinstance(value, dict))]
        flat = [(before + k, v) for before, values in groups for k, v in values.items() if not isinstance(v, dict)]
        params = [Param(name, str(value)[:500]) for name, value in flat]
        for start in range(0, len(params), 100):  # as many as it takes at once
            client.log_batch(run, params=params[start : start + 100])
        write_text(id_file, run)

    def write(record: Numbers) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, metrics=[Metric(k, v, now, record["step"]) for k, v in _tagged(record).items()])

    ends = {"completed": "FINISHED", "interrupted": "KILLED"}
    return write, lambda status: client.set_terminated(run, ends.get(status, "FAILED"))


def _trackio(folder: Path, config: dict[str, Any]) -> Writer:
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # read when it is imported
    import trackio

    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(project="lockstep", name=shown(folder.name), config=config, resume="allow", **quiet)
    return lambda record: run.log(_tagged(record), step=record["step"]), lambda _: run.finish()


def _read_id(path: Path) -> str:
    """The id that a tracker gave the run when it began; empty for a new run."""
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
