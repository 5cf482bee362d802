"""The numbers of the steps since the last log step: they stay on the device until somebody reads them."""

import time
from dataclasses import replace

import torch

from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.training.assemble import Run
from lockstep.watch.records import Means


class NonFinite(UserError):
    """A loss or a weight is no longer finite. All ranks raise it together."""

    def __init__(self, step: int, message: str, config: Config) -> None:
        lower = {"fp16": ["use --precision bf16 or fp32"], "bf16": ["use --precision fp32"]}.get(config.precision, [])
        ways = ["lower --lr", "add --warmup-epochs or --clip-norm", *lower, *_without_the_batch(config)]
        super().__init__(message, f"{', '.join(ways[:-1]).capitalize()}, or {ways[-1]}.")
        self.step = step


def _without_the_batch(config: Config) -> list[str]:
    """The flag that leaves a batch out, where the run does not have it and may."""
    try:
        replace(config, on_nonfinite="rollback")
    except UserError:
        return []
    return [] if config.on_nonfinite == "rollback" else ["leave the batch out with --on-nonfinite rollback"]


class Window:
    """The steps since the last log step."""

    def __init__(self, world: World, run: Run, config: Config) -> None:
        self.world, self.run, self.config = world, run, config
        self.restart()

    def restart(self) -> None:
        """Begin the next window here, with this one unread."""
        self.batches: list[tuple[int, int, float]] = []  # step, samples, learning rate
        self.losses: list[torch.Tensor] = []
        self.waited_ms, self.began = self.run.train.wait_ms, time.perf_counter()

    @property
    def full(self) -> bool:
        """True on a log step."""
        return len(self.batches) == self.config.execution.log_every

    def add(self, step: int, samples: int, loss: torch.Tensor) -> None:
        """Note one step, the samples of its global batch, and this rank's summed loss."""
        self.losses.append(loss)
        self.batches.append((step, samples, self.run.step.optimizer.param_groups[0]["lr"]))

    def _by_step(self) -> list[list[float]]:
        """[steps + 1][ranks]: each rank's summed loss in each step, and its wait for others in ms, -1 if unknown."""
        waited = self.run.step.sync.waited_ms()
        waited = -1.0 if waited is None else waited
        losses = torch.stack(self.losses)
        if self.world.size == 1:
            return [[number] for number in (*losses.tolist(), waited)]
        mine = torch.cat([losses, losses.new_full((1,), waited)])
        by_step: list[list[float]] = self.world.rows(mine.double()).t().tolist()
        return by_step

    def read(self, tolerant: bool = False) -> Means:
        """Mean loss, images/s and waits since the last call: waits for the device, and one small all-reduce.

        `data_wait_ms` is rank 0's mean per step, `comm_wait_ms` that of the rank that waited longest (None: unknown).

        Raises:
            NonFinite: where a loss is not finite, naming step, ranks and learning rate, unless `tolerant`.
        """
        count = len(self.batches)
        *by_step, waits = self._by_step()
        for (step, _, lr), losses in zip(self.batches, by_step, strict=True):
            ranks = [rank for rank, loss in enumerate(losses) if loss - loss != 0]
            if ranks and not tolerant:
                raise NonFinite(
                    step,
                    f"the loss became non-finite at step {step + 1} on rank(s) {', '.join(map(str, ranks))}, "
                    f"learning rate {lr:.3g}",
                    self.config,
                )
        samples = sum(n for _, n, _ in self.batches)
        seconds = time.perf_counter() - self.began
        numbers = Means(
            loss=sum(map(sum, by_step)) / samples,
            images_per_s=round(samples / seconds, 1),
            data_wait_ms=round((self.run.train.wait_ms - self.waited_ms) / count, 3),
            comm_wait_ms=round(max(waits), 3) if min(waits) >= 0 else None,
        )
        self.restart()
        return numbers
