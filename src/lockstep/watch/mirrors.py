"""Copies of the journal's numbers in other formats: CSV, TensorBoard, Weights & Biases."""

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.watch.records import EvalRecord, Mirror, Record, StepRecord

Numbers = StepRecord | EvalRecord
Writer = tuple[Callable[[Numbers], object], Callable[[], object]]  # to write a record, and to close

_PACKAGES = ("tensorboard", "wandb")
_CSV_COLUMNS = (
    "kind", "epoch", "step", "samples", "loss", "lr", "images_per_s", "data_wait_ms", "comm_wait_ms", "top1", "top5",
    "count", "macro_precision", "macro_recall", "macro_f1", "calibration_error",
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
    makers = {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb}
    return tuple(_mirror(*makers[name](folder, config)) for name in names)


def _mirror(write: Callable[[Numbers], object], close: Callable[[], object]) -> Mirror:
    """A mirror of the records with numbers, closed by the `end` record."""

    def mirror(record: Record) -> None:
        if record["kind"] == "step" or record["kind"] == "eval":
            write(record)
        elif record["kind"] == "end":
            close()

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
    return writer.writerow, file.close


def _tensorboard(folder: Path, _: dict[str, Any]) -> Writer:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(record: Numbers) -> None:
        for name, value in _named(record).items():
            writer.add_scalar(name, value, record["step"])

    return write, writer.close


def _wandb(folder: Path, config: dict[str, Any]) -> Writer:
    import wandb

    try:
        # WANDB_MODE=offline keeps everything under the run folder; `wandb sync` sends it later
        run = wandb.init(project="lockstep", dir=str(folder), config=config, name=folder.name)
    except wandb.errors.Error as error:
        raise UserError(
            f"--log wandb: {error}", "Log in with `wandb login`, or keep the run here with WANDB_MODE=offline."
        ) from error
    return lambda record: run.log(_named(record), step=record["step"]), run.finish
