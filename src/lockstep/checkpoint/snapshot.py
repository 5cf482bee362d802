"""A moment of training, copied to host memory: what training waits for while a checkpoint is made."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.checkpoint.format import EMA, MODEL, OPTIMIZER, encode, require_storable
from lockstep.checkpoint.weights import state_tensors
from lockstep.errors import UserError
from lockstep.parallel.sharded import is_part, whole
from lockstep.parallel.strategy import unwrap
from lockstep.processes.devices import has_streams

_BLOCK = 64 << 20  # a power of two: torch rounds pinned allocations up to one
_ALIGN = 64


@dataclass(frozen=True)
class Snapshot:
    """A step's state on the host. Its tensors lie in the buffers that made it, until these make the next."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # file -> name -> tensor
    document: Mapping[str, Any]  # the content of state.json


@dataclass(frozen=True)
class Copy:
    """A copy that is still to be made, of a tensor which the optimizer's next step is the first to change."""

    into: Tensor
    source: Tensor
    version: int  # the source's, when it was noted

    def make(self) -> bool:
        """Copy; False where something has written into the source meanwhile. In one thread, without Python's lock."""
        if runs := _flat(self.into, self.source):
            np.copyto(runs[0], runs[1])
        else:
            self.into.copy_(self.source)
        return self.source._version == self.version


def _flat(*tensors: Tensor) -> list[np.ndarray]:
    """The memory of tensors that lie alike and without gaps, as bytes; nothing where they don't."""
    first = tensors[0]
    dense = torch.empty_like(first, device="meta").stride() == first.stride()
    if not dense or any(t.stride() != first.stride() or t.is_conj() or t.is_neg() for t in tensors):
        return []
    return [t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy() for t in tensors]


class Buffers:
    """Host memory that one snapshot after another uses, pinned where tensors come from a device with streams."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._pinned = False
        self._rewind()

    def _rewind(self) -> None:
        self._next, self._used = 0, 0  # block, bytes of it

    def copy(
        self,
        files: Mapping[str, Mapping[str, Tensor]],
        may_wait: Collection[Tensor] = (),
        later: list[Copy] | None = None,
    ) -> dict[str, dict[str, Tensor]]:
        """Copies of all tensors, with the strides of the originals. Waits once for each device, at the end.

        Those of `may_wait` that lie in the host's memory are not made but noted in `later`.
        """
        tensors = [tensor for named in files.values() for tensor in named.values()]
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        pinned = any(has_streams(device) for device in devices)
        if pinned != self._pinned:
            self._blocks, self._pinned = [], pinned
        self._rewind()
        size = min(_BLOCK, sum(_aligned(tensor.nbytes) for tensor in tensors))
        waiting = {id(tensor) for tensor in may_wait if tensor.device.type == "cpu" and not is_part(tensor)}

        def copied(tensor: Tensor) -> Tensor:
            into = self._like(tensor, size)
            if later is not None and id(tensor) in waiting:
                later.append(Copy(into, tensor, tensor._version))
                return into
            return into.copy_(whole(tensor), non_blocking=pinned)

        with torch.no_grad():
            copies = {file: {name: copied(t) for name, t in named.items()} for file, named in files.items()}
        if pinned:  # elsewhere the copies themselves have waited
            for device in devices:
                torch.accelerator.current_stream(device).synchronize()
        return copies

    def _like(self, tensor: Tensor, size: int) -> Tensor:
        if is_part(tensor):
            layout = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        else:
            layout = torch.empty_like(tensor, device="meta")  # contiguous where the original overlaps itself
        memory = self._take(layout.nbytes, size)
        return memory.view(tensor.dtype).as_strided(layout.shape, layout.stride())

    def _take(self, count: int, size: int) -> Tensor:
        """`count` bytes that nothing else in this snapshot uses; a new block has `size` bytes at least."""
        while self._next < len(self._blocks):
            block = self._blocks[self._next]
            if self._used + count <= len(block):
                start, self._used = self._used, _aligned(self._used + count)
                return block[start : start + count]
            self._next, self._used = self._next + 1, 0
        self._blocks.append(torch.empty(max(size, _aligned(count)), dtype=torch.uint8, pin_memory=self._pinned))
        return self._take(count, size)


def snapshot(
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    ema: nn.Module | None = None,
    state: Mapping[str, Any] | None = None,
    buffers: Buffers | None = None,
    later: list[Copy] | None = None,
) -> Snapshot:
    """Copy all that a run is to host memory, so that training may go on and change it.

    From CUDA or XPU they go to pinned memory and the host waits for them once. Without `buffers` new memory is taken.

    Args:
        step: optimizer steps taken.
        model: wrapped or not; the module inside is what is kept.
        ema: a moving average of the weights, as `torch.optim.swa_utils.AveragedModel`.
        state: plain values (None, bool, int, float, str, and lists, tuples and dicts of them).
        later: where the copies of parameters, their moving average and the optimizer's state are noted instead of made,
            as far as they are in the host's memory: they are to be made before the optimizer's next step.

    Raises:
        UserError: naming what can't be kept: an entry that is no tensor, number or text, a sparse or quantised tensor.
    """
    files, described = _collect(model, optimizer, ema)
    document = {"state": encode(dict(state or {}), "state"), "optimizer": described, "scaler": None}
    copies = (buffers or Buffers()).copy(files, [] if later is None else _updated(files, model, ema), later)
    if scaler is not None:  # after the copies: it reads its scale from the device, which waits for all of them
        document["scaler"] = encode(scaler.state_dict(), "scaler")
    return Snapshot(step, copies, document)


def contribute(model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None) -> None:
    """Hand in this rank's parts of a sharded model, while another rank takes a snapshot of it; keeps nothing."""
    files, _ = _collect(model, optimizer, ema)
    for named in files.values():
        for tensor in named.values():
            whole(tensor)


def _collect(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None
) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """The tensors to keep, by file and name in one order on all ranks, and the optimizer without its tensors."""
    kept = _Collector()
    described = _describe(model, optimizer, kept)
    files: dict[str, Mapping[str, Tensor]] = {MODEL: state_tensors(model), OPTIMIZER: kept.tensors}
    if ema is not None:
        files[EMA] = state_tensors(ema)
    for file, named in files.items():
        for name, tensor in named.items():
            require_storable(f"{name} of {file.partition('.')[0]}", tensor)
    return files, described


def _updated(files: Mapping[str, Mapping[str, Tensor]], model: nn.Module, ema: nn.Module | None) -> list[Tensor]:
    """Those of the tensors to keep that change in an optimizer's step and after it, never in forward and backward."""
    found = [tensor for name, tensor in files[OPTIMIZER].items() if name.startswith("state.")]
    for file, module in ((MODEL, unwrap(model)), (EMA, ema)):
        if module is not None:
            parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            found += [tensor for name, tensor in files[file].items() if name in parameters]
    return found


class _Collector:
    """The tensors of an optimizer by name, each once, and which of them are on the host, their parameter elsewhere."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.on_host: list[str] = []
        self._names: dict[int, str] = {}

    def add(self, where: str, tensor: Tensor, home: torch.device) -> str:
        if id(tensor) in self._names:  # one tensor in two places stays one
            return self._names[id(tensor)]
        name = where
        while name in self.tensors:  # keys with dots in them can spell one path in two ways
            name += "'"
        self.tensors[name], self._names[id(tensor)] = tensor, name
        if tensor.device.type == "cpu" and home.type != "cpu":
            self.on_host.append(name)
        return name


def _describe(model: nn.Module, optimizer: torch.optim.Optimizer, kept: _Collector) -> dict[str, Any]:
    """The optimizer without its tensors, which go to `kept`."""
    saved = optimizer.state_dict()
    parameters = numbered(optimizer, saved)
    home = next(iter(parameters.values())).device
    entries = []
    for index, entry in saved["state"].items():
        if not isinstance(index, int | str):
            raise UserError(
                f"the optimizer has state for a {type(index).__qualname__} that is none of its parameters",
                "Keep state under parameters of its groups, or under a name.",
            )
        device = parameters[index].device if index in parameters else home
        entries.append([index, encode(entry, f"state.{index}", partial(kept.add, home=device))])
    rest = {key: value for key, value in saved.items() if key != "state"}
    return {
        "class": type(optimizer).__qualname__,
        "parameters": describe_parameters(model, optimizer),
        "state": entries,
        "rest": {key: encode(value, key, partial(kept.add, home=home)) for key, value in rest.items()},
        "on_host": kept.on_host,
    }


def numbered(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[Any, Tensor]:
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


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
