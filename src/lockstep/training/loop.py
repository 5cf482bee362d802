"""The story of a run: epochs, steps, evaluation, saving."""

import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision

import lockstep
from lockstep.checkpoint import weights
from lockstep.config import Config
from lockstep.data.loaders import Batch
from lockstep.errors import UserError
from lockstep.parallel.batchnorm import average_buffers
from lockstep.order import EMPTY_LEDGER, extend_ledger
from lockstep.training.assemble import Run, assemble, unsynchronised_batchnorm
from lockstep.training.evaluation import Metrics, evaluate
from lockstep.watch.journal import Journal
from lockstep.watch.mirrors import open_mirrors
from lockstep.watch.progress import ProgressBar
from lockstep.world import World


@dataclass
class Progress:
    """Where a run is; the same on all ranks."""

    steps: int = 0
    samples: int = 0
    ledger: bytes = EMPTY_LEDGER
    metrics: Metrics | None = None
    best_top1: float = -1.0


def train(config: Config, world: World, folder: Path) -> Progress:
    """Train by `config` and leave journal and weights in `folder`, which exists. All ranks call it together."""
    run = assemble(config, world)
    main = world.rank == 0
    mirrors = open_mirrors(config.execution.log, folder, config.to_dict()) if main else ()
    journal = Journal(folder / "journal.jsonl" if main else None, mirrors)
    bar = ProgressBar(config.epochs * len(run.train), config.epochs, enabled=main)
    progress, began = Progress(), time.monotonic()
    journal.write("run", **describe(config, world, run))
    introduce(config, world, run, bar)
    completed = False
    try:
        for epoch in range(config.epochs):
            train_epoch(config, world, run, epoch, progress, journal, bar)
            evaluate_and_save(config, world, run, epoch, progress, journal, bar, folder)
        completed = True
    finally:
        # asked for here, not caught by `except`: a signal can come while the handler of another error runs
        raised = None if completed else sys.exception()
        stopped = isinstance(raised, KeyboardInterrupt | SystemExit)
        bar.close()
        digest = weights.digest(run.model) if main else ""
        metrics = progress.metrics
        journal.write(
            "end",
            status="completed" if completed else "interrupted" if stopped else "failed",
            steps=progress.steps,
            samples=progress.samples,
            seconds=round(time.monotonic() - began, 3),
            top1=metrics.top1 if metrics else None,
            loss=metrics.loss if metrics else None,
            ledger_sha256=progress.ledger.hex(),
            weights_sha256=digest,
            processes=world.size,
            **({"error": str(raised)} if raised and not stopped else {}),
        )
        journal.close()
    return progress


def train_epoch(
    config: Config, world: World, run: Run, epoch: int, progress: Progress, journal: Journal, bar: ProgressBar
) -> None:
    """One pass over the training set. Nothing in it waits for the device but the log steps."""
    window = Window(config, world, run)
    for batch in run.train.epoch(epoch):
        window.add(run.step(batch), batch)
        if run.ema is not None:
            run.ema.update_parameters(run.model)
        progress.steps += 1
        progress.samples += batch.count
        progress.ledger = extend_ledger(progress.ledger, batch.ids)
        if window.full or batch.step + 1 == (epoch + 1) * len(run.train):
            numbers = window.read(progress.steps)
            lr = run.step.optimizer.param_groups[0]["lr"]
            journal.write("step", step=progress.steps, epoch=epoch, samples=progress.samples, lr=lr, **numbers)
            bar.update(progress.steps, epoch + 1, numbers["loss"], lr, numbers["images_per_s"])


def evaluate_and_save(
    config: Config,
    world: World,
    run: Run,
    epoch: int,
    progress: Progress,
    journal: Journal,
    bar: ProgressBar,
    folder: Path,
) -> None:
    """Evaluate on all ranks; rank 0 keeps the newest weights and the best."""
    average_buffers(run.model, world)
    metrics = progress.metrics = evaluate(run.evaluated, run.val, world, config.precision)
    journal.write("eval", epoch=epoch, step=progress.steps, **metrics.to_dict())
    bar.say(f"epoch {epoch + 1}/{config.epochs}: {metrics}")
    if world.rank == 0:
        note = {"epoch": str(epoch), "step": str(progress.steps), "top1": repr(metrics.top1)}
        weights.save(run.evaluated, folder / "weights" / "final.safetensors", note)
        if metrics.top1 > progress.best_top1:
            weights.save(run.evaluated, folder / "weights" / "best.safetensors", note)
    progress.best_top1 = max(progress.best_top1, metrics.top1)


class Window:
    """The steps since the last log step: losses stay on the device until `read`."""

    def __init__(self, config: Config, world: World, run: Run) -> None:
        self.world, self.run, self.every = world, run, config.execution.log_every
        self.losses = torch.zeros(self.every, dtype=torch.float64, device=world.device)
        self._reset()

    def _reset(self) -> None:
        self.batches: list[tuple[int, int, float]] = []
        self.run.train.wait_ms, self.began = 0.0, time.perf_counter()

    @property
    def full(self) -> bool:
        """True on a log step."""
        return len(self.batches) == self.every

    def add(self, loss: torch.Tensor, batch: Batch) -> None:
        """Note one step's summed loss of this rank."""
        self.losses[len(self.batches)] = loss
        self.batches.append((batch.step, batch.count, self.run.step.optimizer.param_groups[0]["lr"]))

    def read(self, steps: int) -> dict[str, float]:
        """Mean loss, images/s and data wait since the last call (a CPU-GPU synchronisation and one small all-reduce).

        Raises:
            UserError: where a loss is not finite, naming step, ranks and learning rate.
        """
        count = len(self.batches)
        table = torch.zeros(self.world.size, count, dtype=torch.float64, device=self.world.device)
        table[self.world.rank] = self.losses[:count]
        by_step = self.world.sum(table).t().tolist()  # [steps][ranks]
        for (step, _, lr), losses in zip(self.batches, by_step, strict=True):
            ranks = [rank for rank, loss in enumerate(losses) if loss - loss != 0]
            if ranks:
                raise UserError(
                    f"the loss became non-finite at step {step + 1} on rank(s) {', '.join(map(str, ranks))}, "
                    f"learning rate {lr:.3g}",
                    "Lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32 or bf16.",
                )
        samples = sum(n for _, n, _ in self.batches)
        seconds = time.perf_counter() - self.began
        numbers = {
            "loss": sum(map(sum, by_step)) / samples,
            "images_per_s": round(samples / seconds, 1),
            "data_wait_ms": round(self.run.train.wait_ms / count, 3),
        }
        self._reset()
        return numbers


def describe(config: Config, world: World, run: Run) -> dict[str, object]:
    """The journal's `run` record: what runs, where, on what."""
    return {
        "config": config.to_dict(),
        "world": {"size": world.size, "local_size": world.local_size, "backend": world.backend},
        "device": device_name(world.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "lockstep": lockstep.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "python": platform.python_version(),
        },
        "data": {"name": run.train.images.name, "fingerprint": run.train.images.fingerprint},
        "parameters": sum(p.numel() for p in run.model.parameters()),
    }


def device_name(device: torch.device) -> str:
    """A device in words, for records."""
    if device.type == "cpu":
        return f"cpu ({platform.processor() or platform.machine()})"
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def introduce(config: Config, world: World, run: Run, bar: ProgressBar) -> None:
    """Say in a few lines what is about to happen, and what depends on the number of processes."""
    optim, order = config.optim, run.train.order
    per_rank = -(-config.batch_size // world.size)
    bar.say(
        f"{config.recipe}: {config.model.model} on {run.train.images.name}, {order.samples_per_epoch:,} images an epoch, "
        f"batch {config.batch_size} = {world.size} process(es) x {per_rank} on {world.device.type}, {config.precision}"
    )
    if optim.scale_lr != "none":
        bar.say(
            f"learning rate {optim.lr:g} scaled {optim.scale_lr} by batch {config.batch_size} / "
            f"{optim.base_batch_size or config.batch_size} = {config.lr:g}"
        )
    if not config.shards and unsynchronised_batchnorm(run.model, world):
        bar.say(
            "note: batch norm takes its statistics over each process's own share, so results depend a little on --nproc; "
            "--sync-bn takes them over the whole batch"
        )
