"""Checkpoints in the background: training waits for the snapshot, a thread does the rest."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from lockstep.checkpoint.snapshot import Buffers, Copy, Snapshot, snapshot
from lockstep.checkpoint.store import Phase, prune, write
from lockstep.errors import UserError
from lockstep.watch.journal import seal
from lockstep.watch.records import CheckpointRecord


class Writer:
    """Writes a run's checkpoints, one at a time, on one rank. Call it from one thread.

    Args:
        folder: where the checkpoints go; its parent exists.
        keep: how many of the newest stay, beside the best.
        timeout_s: the longest that a write may keep training or the end of the run waiting.
        at: called in the writing thread with the name of each phase of a write as it begins.
    """

    def __init__(self, folder: Path, keep: int, timeout_s: float = 600.0, at: Phase = lambda _: None) -> None:
        self.folder, self.keep, self.timeout_s, self.at = folder, keep, timeout_s, at
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None
        self._step, self._stall_ms = -1, 0.0
        self._copied = threading.Event()  # the newest snapshot is whole
        self._hook: Any = None  # of the optimizer, whose next step waits for that
        self._saved: SimpleQueue[CheckpointRecord] = SimpleQueue()
        self._failed: SimpleQueue[Exception] = SimpleQueue()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        ema: nn.Module | None = None,
        state: Mapping[str, Any] | None = None,
        best: int | None = None,
        overlap: bool = False,
    ) -> float:
        """Snapshot now, write in the background; returns how long this took, in ms. Arguments as `snapshot` has them.

        Waits for the write before, if that is still going on. `best`: the step whose checkpoint outlives `keep`.

        `overlap`: what lies in the host's memory is copied while the next forward and backward pass only read it, and
        `optimizer.step` waits for the rest. Until then nothing else may write into parameters and state; where torch
        counts such a write this checkpoint is not made, and `failure` tells it.

        Raises:
            UserError: where the write before takes longer than `timeout_s`, or the state can't be kept. A write that
                failed does not show here but in `failure`, and this one is made nevertheless.
        """
        began = time.perf_counter()
        self._wait(self.timeout_s)
        later: list[Copy] | None = [] if overlap else None
        taken = snapshot(step, model, optimizer, scaler, ema, state, self._buffers, later)
        self._step, self._stall_ms = step, (time.perf_counter() - began) * 1000
        self._copied.clear()
        # a daemon: a disk that never answers must not keep the process from ending
        write = (taken, later or [], best, began)
        thread = threading.Thread(target=self._write, args=write, name="checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise UserError(
                f"the checkpoint of step {step} can't be written: {error}",
                "The system gives this user no more threads: look at `ulimit -u` and the container's pids limit.",
            ) from error
        self._thread = thread
        if later:
            self._hook = optimizer.register_step_pre_hook(self._before_update)
        return (time.perf_counter() - began) * 1000

    def _before_update(self, *_: object) -> None:
        """Before the optimizer's step, which changes what is being copied; a moment's work once it is copied."""
        if not self._copied.is_set():
            began = time.perf_counter()
            self._copied.wait()
            self._stall_ms += (time.perf_counter() - began) * 1000

    def _copy(self, later: list[Copy], step: int) -> None:
        try:
            if later:
                self.at("copy")
            if not all(copy.make() for copy in later):
                raise UserError(
                    f"the checkpoint of step {step} was not made: something beside the optimizer's step wrote into "
                    "parameters or the optimizer's state while they were copied",
                    "Keep in buffers what forward writes; older checkpoints are as they were.",
                )
        finally:
            self._copied.set()

    def _write(self, taken: Snapshot, later: list[Copy], best: int | None, began: float) -> None:
        try:
            self._copy(later, taken.step)
            written = write(taken, self.folder, self.at)
            self._saved.put(
                CheckpointRecord(
                    kind="checkpoint",
                    step=taken.step,
                    digest=written.digest,
                    seal=seal(taken.step, written.digest),
                    bytes=written.bytes,
                    stall_ms=round(self._stall_ms, 3),
                    durable_ms=round((time.perf_counter() - began) * 1000, 3),
                )
            )
            prune(self.folder, self.keep, best, self.at)
        except Exception as error:  # it is the training thread's to raise: `failure`
            self._failed.put(error)

    @property
    def busy(self) -> bool:
        """True while a write is going on."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True while a failure waits to be asked for; never waits."""
        return not self._failed.empty()

    def finished(self) -> list[CheckpointRecord]:
        """The checkpoints that came to the device since the last call, with what they cost; never waits."""
        self._let_go()
        return [self._saved.get_nowait() for _ in range(self._saved.qsize())]

    def _let_go(self) -> None:
        """The optimizer has nothing to wait for any longer."""
        if self._hook is not None and self._copied.is_set():
            self._hook.remove()
            self._hook = None

    def failure(self) -> Exception | None:
        """The newest write that failed since the last call, as its error; never waits.

        All older checkpoints are as they were, and the next `save` is tried. The training loop asks where the ranks
        agree on things, so that all of them stop together.
        """
        error = None
        while not self._failed.empty():
            error = self._failed.get_nowait()
        return error

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the write that is going on, at the end of a run. `finished` has the last one afterwards.

        Raises:
            UserError: where it takes longer, or failed, or an earlier failure was not asked for.
        """
        self._wait(self.timeout_s if timeout_s is None else timeout_s)
        if (error := self.failure()) is not None:
            raise error

    def _wait(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise UserError(
                f"the checkpoint of step {self._step} is not on disk after {timeout_s:g} s in {self.folder}",
                "Its storage is slow or gone: look at it, save less often, or continue in another folder.",
            )
        self._thread = None
        self._let_go()
