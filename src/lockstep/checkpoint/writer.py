"""Writing checkpoints: training waits while its state is copied to host memory, a thread does the rest."""

import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.checkpoint.format import EMA, MODEL, OPTIMIZER, encode, require_storable
from lockstep.checkpoint.store import Snapshot, prune, write
from lockstep.checkpoint.weights import state_tensors
from lockstep.distributed.devices import has_streams
from lockstep.errors import UserError
from lockstep.monitoring.journal import CheckpointRecord, checksum
from lockstep.parallel.fsdp import whole
from lockstep.parallel.strategy import unwrap


class Writer:
    """Writes a run's checkpoints, one at a time, on one rank. Call it from one thread.

    Args:
        folder: where the checkpoints go; its parent exists.
        keep: how many of the newest stay, beside the best.
        timeout_s: the longest that a write may keep training or the end of the run waiting.
    """

    def __init__(self, folder: Path, keep: int, timeout_s: float = 600.0) -> None:
        self.folder, self.keep, self.timeout_s = folder, keep, timeout_s
        self._taken: Snapshot | None = None  # the newest, whose memory the next one uses again
        self._thread: threading.Thread | None = None
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
    ) -> float:
        """Snapshot now, write in the background; returns how long this took, in ms. Arguments as `snapshot` has them.

        Waits for the write before, if that is still going on. `best`: the step whose checkpoint outlives `keep`.
        Raises UserError where that write takes longer than `timeout_s`, or the state can't be kept. A write that failed
        does not show here but in `failure`, and this one is made nevertheless.
        """
        began = time.perf_counter()
        self._wait(self.timeout_s)
        self._taken = taken = snapshot(step, model, optimizer, scaler, ema, state, self._taken)
        stall_ms = (time.perf_counter() - began) * 1000
        work = (taken, best, began, stall_ms)
        # a daemon: a disk that never answers must not keep the process from ending
        thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            remedy = "The system gives this user no more threads: look at `ulimit -u` and the container's pids limit."
            raise UserError(f"the checkpoint of step {step} can't be written: {error}", remedy) from error
        self._thread = thread
        return stall_ms

    def _write(self, taken: Snapshot, best: int | None, began: float, stall_ms: float) -> None:
        try:
            manifest = write(taken, self.folder)
            # the digest is kept in the journal, so that a forged checkpoint is found out
            record = CheckpointRecord(
                kind="checkpoint",
                step=taken.step,
                digest=manifest.digest,
                checksum=checksum(taken.step, manifest.digest),
                bytes=sum(file.bytes for file in manifest.files.values()),
                stall_ms=round(stall_ms, 3),
                durable_ms=round((time.perf_counter() - began) * 1000, 3),
            )
            self._saved.put(record)
            prune(self.folder, self.keep, best)
        except Exception as error:  # the training thread raises it: `failure`
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
        return [self._saved.get_nowait() for _ in range(self._saved.qsize())]

    def failure(self) -> Exception | None:
        """The error of the newest write that failed since the last call; older checkpoints are as they were."""
        error = None
        while not self._failed.empty():
            error = self._failed.get_nowait()
        return error

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the write that is going on. Raises UserError where it takes longer, or one has failed."""
        self._wait(self.timeout_s if timeout_s is None else timeout_s)
        if (error := self.failure()) is not None:
            raise error

    def _wait(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._taken is not None:
            raise UserError(
                f"the checkpoint of step {self._taken.step} is not on disk after {timeout_s:g} s in {self.folder}",
                "Its storage is slow or gone: look at it, save less often, or continue in another folder.",
            )
        self._thread = None


def copy_to_host(
    files: Mapping[str, Mapping[str, Tensor]], reuse: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Copies of all tensors by file and name, where they fit in the memory of earlier ones; waits once for a device.

    They are in pinned memory where tensors come from a device with streams.
    """
    devices = {tensor.device for tensors in files.values() for tensor in tensors.values()}
    pinned = any(has_streams(device) for device in devices)

    def copied(tensor: Tensor, memory: Tensor | None) -> Tensor:
        value = whole(tensor)
        if memory is None or (memory.shape, memory.dtype) != (value.shape, value.dtype):
            memory = torch.empty_like(value, device="cpu", pin_memory=pinned)
        return memory.copy_(value, non_blocking=pinned)

    with torch.no_grad():
        copies = {
            file: {name: copied(tensor, reuse.get(file, {}).get(name)) for name, tensor in tensors.items()}
            for file, tensors in files.items()
        }
    for device in filter(has_streams, devices):  # elsewhere the copies themselves have waited
        torch.accelerator.current_stream(device).synchronize()
    return copies


def snapshot(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    ema: nn.Module | None = None,
    state: Mapping[str, Any] | None = None,
    reuse: Snapshot | None = None,
) -> Snapshot:
    """Copy the state of a run to host memory, so that training may go on and change it; the host waits once.

    Args:
        step: optimizer steps taken.
        model: wrapped or not; the module inside is what is kept.
        ema: a moving average of the weights, as `torch.optim.swa_utils.AveragedModel`.
        state: plain values (None, bool, int, float, str, and lists, tuples and dicts of them).
        reuse: an earlier one, whose memory may be written over.

    Raises UserError, which names what can't be kept: no tensor, number or text; a sparse or quantised tensor.
    """
    files, described = _collect(model, optimizer, ema)
    document = {"state": encode(dict(state or {}), "state"), "optimizer": described, "scaler": None}
    copies = copy_to_host(files, reuse.tensors if reuse else {})
    if scaler is not None:  # after the copies: it reads its scale from the device, which waits for all of them
        document["scaler"] = encode(scaler.state_dict(), "scaler")
    return Snapshot(step, copies, document)


def contribute(model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None) -> None:
    """Send this rank's shards of a sharded model, while another rank takes a snapshot of it; keeps nothing."""
    files, _ = _collect(model, optimizer, ema)
    for tensors in files.values():
        for tensor in tensors.values():
            whole(tensor)


def _collect(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """The tensors to keep, by file and name in one order on all ranks, and the optimizer without its tensors."""
    kept: dict[str, Tensor] = {}
    described = _describe(model, optimizer, kept)
    files: dict[str, Mapping[str, Tensor]] = {MODEL: state_tensors(model), OPTIMIZER: kept}
    if ema is not None:
        files[EMA] = state_tensors(ema)
    for file, tensors in files.items():
        for name, tensor in tensors.items():
            require_storable(f"{name} of {file.partition('.')[0]}", tensor)
    return files, described


def _describe(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The optimizer without its tensors, which go to `tensors` by name."""
    names: dict[int, str] = {}
    on_host: list[str] = []  # of these the parameter is elsewhere

    def add(where: str, tensor: Tensor, home: torch.device) -> str:
        if id(tensor) in names:  # one tensor in two places stays one
            return names[id(tensor)]
        while where in tensors:  # keys with dots in them can spell one path in two ways
            where += "'"
        tensors[where], names[id(tensor)] = tensor, where
        if tensor.device.type == "cpu" and home.type != "cpu":
            on_host.append(where)
        return where

    saved = optimizer.state_dict()
    if missing := {"state", "param_groups"} - saved.keys():
        what = f"{type(optimizer).__qualname__}.state_dict() has no {' and no '.join(sorted(missing))}"
        raise UserError(
            what, "Let it return both, as torch.optim.Optimizer's does; other entries may stand beside them."
        )
    parameters = parameters_by_index(optimizer, saved)
    home = next(iter(parameters.values())).device
    entries = []
    for index, entry in saved["state"].items():
        if not isinstance(index, int | str):
            kind, remedy = type(index).__qualname__, "Keep state under parameters of its groups, or under a name."
            raise UserError(f"the optimizer has state for a {kind} that is none of its parameters", remedy)
        device = parameters[index].device if index in parameters else home
        entries.append([index, encode(entry, f"state.{index}", partial(add, home=device))])
    return {
        "class": type(optimizer).__qualname__,
        "parameters": describe_parameters(model, optimizer),
        "state": entries,
        "rest": {key: encode(item, key, partial(add, home=home)) for key, item in saved.items() if key != "state"},
        "on_host": on_host,
    }


def parameters_by_index(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[Any, Tensor]:
    """The optimizer's parameters by the numbers that its state_dict gives them."""
    groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    return {index: p for live, group in groups for p, index in zip(live["params"], group["params"], strict=True)}


def describe_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[list[Any]]]:
    """Name, shape and dtype of each parameter, group by group: what the state's numbers refer to."""
    names = {id(parameter): name for name, parameter in unwrap(model).named_parameters()}

    def describe(parameter: Tensor) -> list[Any]:
        name = names.get(id(parameter), "(not the model's)")
        return [name, list(parameter.shape), str(parameter.dtype).removeprefix("torch.")]

    return [[describe(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
