"""Verify a checkpoint, and copy it into the live objects, or list the differences that forbid it.

Nothing in a checkpoint is trusted before every byte agrees, and nothing in it is ever executed.
"""

import errno
import hashlib
import io
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor, nn

from lockstep.checkpoint.carried import hand_over, hidden_state, lost_line, moved_since, with_inner
from lockstep.checkpoint.format import (
    EMA,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Damaged,
    Manifest,
    decode,
    parse_json,
    read_tensors,
)
from lockstep.checkpoint.store import folder_name, list_checkpoints, set_aside, tidy
from lockstep.checkpoint.weights import copy_into, diff_tensors, state_tensors
from lockstep.checkpoint.writer import Writer, contribute, describe_parameters, parameters_by_index
from lockstep.distributed.files import require_local
from lockstep.distributed.world import World
from lockstep.errors import UserError, refusal
from lockstep.parallel.buffers import average_buffers
from lockstep.parallel.fsdp import is_part, part_of
from lockstep.parallel.hidden_state import HiddenState
from lockstep.parallel.strategy import unwrap

_MAX_MANIFEST, _MAX_STATE = 1 << 16, 1 << 28  # bytes; a manifest of four files has 700
_NO_STATE = f"{STATE} does not have the entries of a checkpoint"
_SHOWN = 12  # lines of a difference that an error lists
_ADAM, _ADADELTA = ("step", "exp_avg", "exp_avg_sq"), ("step", "square_avg", "acc_delta")
_ENTRIES = {"SGD": ("momentum_buffer",), "Adam": _ADAM, "AdamW": _ADAM, "Adadelta": _ADADELTA}  # for each parameter
_KERNELS = ("foreach", "fused", "capturable")  # how an optimizer computes: the live one's, it may be on another device
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO, errno.ENXIO}  # others are about rights and mounts


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that verified. Small: the tensors are still on the disk."""

    path: Path
    step: int
    digest: str  # of its manifest
    state: dict[str, Any]  # as `snapshot` got it
    document: dict[str, Any]  # the content of state.json
    has_ema: bool
    set_aside: Sequence[tuple[str, str]] = ()  # (name, reason) of damaged checkpoints after it

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the other ranks, which need not read all of it again."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "state"}
        return values | {"path": str(self.path)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Loaded":
        """The inverse of `to_dict`."""
        state = decode(values["document"]["state"])
        return cls(**{**values, "path": Path(values["path"]), "state": state})


def newest(folder: Path, journal: Mapping[int, str] | None = None) -> Loaded | None:
    """The newest checkpoint that verifies; None where there never was one. For one rank.

    Damaged ones on the way are renamed to `damaged-...` and listed in `set_aside`. `journal`: manifest digests by step,
    which must agree. Raises UserError where checkpoints there are or were, and none is good or can be read.
    """
    bad: list[tuple[str, str]] = []
    for step, path in reversed(list_checkpoints(folder).items()):
        try:
            return replace(verify(path, (journal or {}).get(step)), set_aside=tuple(bad))
        except Damaged as damage:
            moved = set_aside(path, "damaged")
            bad.append((path.name, str(damage) if moved else f"{damage} (and it could not be renamed)"))
    earlier = sorted(path.name for path in folder.glob("damaged-step-*"))
    if bad or earlier:
        found = "; ".join(f"{name}: {reason}" for name, reason in bad) or ", ".join(earlier)
        remedy = "Put a copy of one back, or start over in another folder with --out."
        raise UserError(f"no good checkpoint is left in {folder} ({found})", remedy)
    return None


def open_checkpoint(path: Path, digest: str | None = None) -> Loaded:
    """A checkpoint that the user named, verified; it stays where it is. Raises UserError where it is no good one."""
    try:
        return verify(path.resolve(), digest)
    except Damaged as damage:
        remedy = "Name a folder checkpoints/step-... of a run, or another one."
        raise UserError(f"{path} is no good checkpoint: {damage}", remedy) from damage


def verify(path: Path, digest: str | None = None) -> Loaded:
    """Check every byte of a checkpoint: the list of files, each one's size and SHA-256, the manifest, the contents.

    No link is followed, no other file type read, and no size believed that is not the file's own. `digest`: of the
    manifest, where it is known from elsewhere. Raises Damaged with the reason, and UserError where it can't be read.
    """
    try:
        _require(stat.S_ISDIR(path.lstat().st_mode), "it is no folder")
        manifest = _read_manifest(path)
        _require(digest in (None, manifest.digest), f"{MANIFEST} is not the one that the journal noted")
        _require(folder_name(manifest.step) == path.name, f"it holds step {manifest.step}")
        for name, record in manifest.files.items():
            with _opened(path / name, record.bytes, exact=True) as file:
                sha = hashlib.file_digest(file, "sha256").hexdigest()
            _require(sha == record.sha256, f"{name} has another SHA-256 than {MANIFEST} says")
        state, document = _read_contents(path, manifest)
    except OSError as error:
        if error.errno in _DAMAGE:
            raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
        remedy = "Give this user the right to read it, or bring its storage back."
        raise UserError(f"can't read the checkpoint {path}: {refusal(error)}", remedy) from error
    except RecursionError as error:
        raise Damaged(f"{STATE} is nested too deeply") from error
    return Loaded(path, manifest.step, manifest.digest, state, document, EMA in manifest.files)


def _read_manifest(path: Path) -> Manifest:
    present = {entry.name for entry in path.iterdir()}
    _require(MANIFEST in present, f"{MANIFEST} is missing")
    with _opened(path / MANIFEST, _MAX_MANIFEST) as file:
        manifest = Manifest.from_bytes(file.read())
    expected = {MANIFEST, *manifest.files}
    _require(expected <= present, f"missing: {', '.join(sorted(expected - present))}")
    _require(present <= expected, f"not in {MANIFEST}: {', '.join(map(repr, sorted(present - expected)))}")
    return manifest


@contextmanager
def _opened(path: Path, limit: int, exact: bool = False) -> Iterator[io.BufferedReader]:
    """A regular file of at most, or `exact`ly, `limit` bytes, no link; Damaged for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # which waits for no FIFO
    try:
        found = os.fstat(descriptor)
        _require(stat.S_ISREG(found.st_mode), f"{path.name} is no plain file")
        fits = found.st_size == limit if exact else found.st_size <= limit
        _require(fits, f"{path.name} has {found.st_size} bytes instead of {'' if exact else 'at most '}{limit}")
        with open(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _read_contents(path: Path, manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and document of a checkpoint whose files agree with its manifest: forged, it may hold anything still."""
    tensors = {name: read_tensors(path / name)[0] for name in manifest.files if name != STATE}
    with _opened(path / STATE, _MAX_STATE) as file:
        document = parse_json(file.read(), STATE)

    def find(name: str, _: str) -> Tensor:
        _require(name in tensors[OPTIMIZER], f"{STATE} names {name!r}, which {OPTIMIZER} does not have")
        return tensors[OPTIMIZER][name]

    match document:
        case {"state": state, "scaler": None | dict(), "optimizer": {
            "class": str(), "parameters": list(parameters), "state": list(entries), "on_host": list(on_host),
            "rest": {"param_groups": list(groups)} as rest,
        }}:  # fmt: skip
            sound = all(isinstance(e, list) and len(e) == 2 and isinstance(e[0], int | str) for e in entries)
            sound = sound and all(isinstance(entry, dict) for entry in (*groups, *(entry for _, entry in entries)))
            sound = sound and all(isinstance(group, list) for group in parameters)
            _require(sound and all(isinstance(name, str) for name in on_host), _NO_STATE)
            decode([entries, rest], find)
            plain = decode(state)
            _require(isinstance(plain, dict), _NO_STATE)
            return plain, document
    raise Damaged(_NO_STATE)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Damaged(reason)


def restore(
    loaded: Loaded,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ema: nn.Module | None = None,
    keep: Collection[str] = (),
) -> dict[str, Any]:
    """Copy a checkpoint into the live objects, bit by bit, each tensor to where it lives; returns the saved state.

    Live tensors keep their strides; optimizer state of its parameter's shape gets that parameter's. `keep`: entries of
    the optimizer's groups whose live value stays, as ("lr", "initial_lr") where the run changes it.

    Raises UserError, and changes nothing, where names, shapes, dtypes or the optimizer are others: it lists them.
    """
    try:
        tensors = {MODEL: read_tensors(loaded.path / MODEL)[0]}
        lines = [f"model: {line}" for line in diff_tensors(tensors[MODEL], state_tensors(model))]
        if ema is not None:
            if not loaded.has_ema:
                lines.append("ema: the checkpoint has no moving average, this run keeps one")
            else:
                tensors[EMA] = read_tensors(loaded.path / EMA)[0]
                lines += [f"ema: {line}" for line in diff_tensors(tensors[EMA], state_tensors(ema))]
        if optimizer is not None:
            lines += _diff_optimizer(loaded.document["optimizer"], model, optimizer)
            if not lines and not _state_fits(loaded, read_tensors(loaded.path / OPTIMIZER)[0], optimizer):
                lines.append("optimizer: its state is not what its class keeps")
        scale = decode(loaded.document["scaler"]) if scaler is not None and loaded.document["scaler"] else None
        if scaler is not None and scale is not None and not _scaler_fits(scale, scaler.state_dict()):
            lines.append("scaler: its state is not what a gradient scaler keeps")
        if lines:
            more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            raise UserError(
                "\n    ".join([f"{loaded.path} is not of this run (checkpoint -> now):", *lines[:_SHOWN], *more]),
                "Resume with the model and optimizer that wrote it, or start another run with --out.",
            )
        _copy(model, tensors[MODEL])
        if ema is not None:
            _copy(ema, tensors[EMA])
        if optimizer is not None:
            _restore_optimizer(loaded, optimizer, keep)
        if scaler is not None and scale is not None:
            scaler.load_state_dict(scale)
    except (Damaged, OSError) as error:
        remedy = "It was in order a moment ago: is its storage?"
        raise UserError(f"can't read the checkpoint {loaded.path}: {error}", remedy) from error
    return loaded.state


def _scaler_fits(saved: Any, live: Mapping[str, Any]) -> bool:
    """Whether a scaler's saved state has the entries of a live one, each a number that it can have."""
    numbers: Iterable[Any] = saved.values() if isinstance(saved, dict) and set(saved) == set(live) else ("",)
    return all(type(value) in (int, float) and 0 <= value < float("inf") for value in numbers)


def _copy(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = state_tensors(model)
    copy_into(model, {name: part_of(tensor, own[name]) for name, tensor in tensors.items()})


def _diff_optimizer(saved: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    name = type(optimizer).__qualname__
    if saved["class"] != name:
        return [f"optimizer: {saved['class']} -> {name}"]
    before, after = saved["parameters"], describe_parameters(model, optimizer)
    if before == after:
        return [] if _indices_fit(saved, optimizer) else ["optimizer: its state is not what its class writes"]
    if (sizes := [len(group) for group in before]) != (now := [len(group) for group in after]):
        return [f"optimizer: parameters by group {sizes} -> {now}"]
    pairs = [(old, new) for olds, news in zip(before, after, strict=True) for old, new in zip(olds, news, strict=True)]
    return [f"optimizer: parameter {number}: {old} -> {new}" for number, (old, new) in enumerate(pairs) if old != new]


def _indices_fit(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the saved groups and state belong to the parameters by their numbers."""
    live = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    indices, numbers = [index for index, _ in saved["state"]], {number for group in live for number in group}
    distinct = len(set(indices)) == len(indices) and all(isinstance(i, str) or i in numbers for i in indices)
    return distinct and [group.get("params") for group in saved["rest"]["param_groups"]] == live


def _state_fits(loaded: Loaded, tensors: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Whether the state of torch's usual optimizers has the entries and shapes that they keep for each parameter."""
    wanted, saved = _ENTRIES.get(type(optimizer).__qualname__), loaded.document["optimizer"]
    parameters = parameters_by_index(optimizer, saved["rest"])

    def fits(name: str, value: Any, parameter: Tensor) -> bool:
        if value is None and name == "momentum_buffer":
            return True
        tensor = tensors.get(value.get("$tensor", "")) if isinstance(value, dict) else None
        if tensor is None or not tensor.is_floating_point():
            return False
        return tensor.shape == (torch.Size() if name == "step" else parameter.shape)

    for index, entry in saved["state"] if wanted else ():
        if index not in parameters or (set(entry) ^ set(wanted or ())) - {"max_exp_avg_sq"}:
            return False
        if not all(fits(name, value, parameters[index]) for name, value in entry.items()):
            return False
    return True


def _restore_optimizer(loaded: Loaded, optimizer: torch.optim.Optimizer, keep: Collection[str]) -> None:
    saved, tensors = loaded.document["optimizer"], read_tensors(loaded.path / OPTIMIZER)[0]
    on_host, placed = set(saved["on_host"]), {}

    def place(name: str, key: str, home: Tensor) -> Tensor:
        if name not in placed:
            placed[name] = _placed(tensors[name], home, on_host=name in on_host or key == "step")
        return placed[name]

    first = optimizer.param_groups[0]["params"][0]
    rest = decode(saved["rest"], partial(place, home=first))
    parameters = parameters_by_index(optimizer, rest)
    state = {index: decode(entry, partial(place, home=parameters.get(index, first))) for index, entry in saved["state"]}
    for group, live in zip(rest["param_groups"], optimizer.param_groups, strict=True):
        group.update({name: live[name] for name in (*_KERNELS, *keep) if name in live})
    held = [vars(each) for each in with_inner(optimizer)]  # one around another may have them as properties
    groups = [(each, each["param_groups"], [*each["param_groups"]]) for each in held if "param_groups" in each]
    states = [(each, each["state"]) for each in held if "state" in each]
    optimizer.load_state_dict({**rest, "state": state})
    for each, live, inside in groups:  # torch puts new ones there, and an optimizer around it holds these
        for group, new in zip(inside, each["param_groups"], strict=True):
            group.update(new)
        live[:] = inside
        each["param_groups"] = live
    for each, kept in states:
        if each["state"] is not kept:
            kept.clear()
            kept.update(each["state"])
            each["state"] = kept
    for index, entry in state.items():
        key = parameters.get(index, index)
        for _, kept in states:
            if len(states) == 1 or (isinstance(entry, dict) and entry.keys() <= kept.get(key, {}).keys()):
                kept[key] = _uncast(kept[key], entry, "")


def _placed(source: Tensor, home: Tensor, on_host: bool) -> Tensor:
    """A copy of a mapped tensor beside its parameter or on the host; of the parameter's shape, it gets its strides."""
    if source.shape == home.shape and is_part(home) and not on_host:
        return part_of(source, home)
    device = torch.device("cpu") if on_host else home.device
    if source.shape == home.shape:
        return torch.empty_like(home.detach(), dtype=source.dtype, device=device).copy_(source)
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(source)


def _uncast(live: Any, ours: Any, key: str) -> Any:
    """`live` with the casts of `load_state_dict` to the parameter's dtype undone; it knows best where a `step` goes."""
    if isinstance(ours, Tensor) and isinstance(live, Tensor):
        return live if key == "step" or (live.dtype, live.device) == (ours.dtype, ours.device) else ours
    if isinstance(ours, dict) and isinstance(live, dict):
        live.update({name: _uncast(live.get(name), value, str(name)) for name, value in ours.items()})
        return live
    if isinstance(ours, list | tuple) and isinstance(live, list | tuple) and len(ours) == len(live):
        return type(ours)(_uncast(a, b, key) for a, b in zip(live, ours, strict=True))
    return ours


STEPS = WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[Any]]()  # the TrainSteps, for loops of one's own


class Checkpoints:
    """Checkpoints of a loop of your own. All ranks make one and call its methods together; rank 0 writes.

    Args:
        folder: where they lie; it is made where it is not there.
        model, optimizer: what is kept, also of a model in DDP or FSDP, with what their code keeps outside of a
            state_dict; and of the optimizer's TrainStep, where it is made before this, its loss and fp16's scale.
        keep: how many of the newest stay.
        ema: a moving average of the weights, as torch's AveragedModel: kept and restored too.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        keep: int = 2,
        *,
        ema: nn.Module | None = None,
    ) -> None:
        require_local(str(folder))
        self.folder, self.model, self.optimizer, self.world = Path(folder), model, optimizer, world
        self.ema = ema
        self.state: dict[str, Any] = {}  # what `resume` found beside them
        self._writer = Writer(self.folder, keep)
        self._bare, self._lost = unwrap(model), False
        self._began = self._hidden()

    def _step(self) -> Any:
        """The optimizer's TrainStep, None where there is none yet."""
        known = STEPS.get(self.optimizer)
        return None if known is None else known()

    def _hidden(self) -> HiddenState:
        """What the loop's parts keep beside state_dicts, as it is now."""
        step = self._step()
        return hidden_state(self._bare, self.optimizer, None if step is None else step.loss, self.ema)

    def resume(self) -> int:
        """Restore the newest good checkpoint; returns the step that it was saved with, 0 where there is none.

        Raises UserError where none is good, or it is another model's, and PeerError on ranks that wait for rank 0.
        """

        def look() -> dict[str, Any] | None:
            if not self.folder.exists():
                return None
            tidy(self.folder)
            found = newest(self.folder)
            return None if found is None else found.to_dict()

        theirs = self.world.by_first(look)
        if theirs is None:
            return 0
        loaded, step = Loaded.from_dict(theirs), self._step()
        for name, reason in loaded.set_aside:
            self.world.print(f"lockstep: note: damaged and set aside: {name} ({reason})")
        scaler = None if step is None else step.scaler
        if loaded.document["scaler"] and scaler is None:
            what = f"{loaded.path} has the scale of fp16's gradients, and no step with this optimizer takes one yet"
            raise UserError(what, 'Make the TrainStep, with precision="fp16", before resume().')
        saved = restore(loaded, self.model, self.optimizer, scaler, self.ema)
        hand_over(self._hidden(), saved.get("hidden", {}), self._bare)
        if step is not None:
            step.host_generators.used = saved.get("host_draws") or step.host_generators.used
        self.state = saved["own"]
        return loaded.step

    def save(self, step: int, **state: Any) -> None:
        """Keep model and optimizer as they are after so many steps, and plain values by name.

        The disk is written while training goes on. Raises UserError where this write or the one before fails.
        """
        average_buffers(self._bare, self.world.size)
        if self.world.rank:
            contribute(self.model, self.optimizer, self.ema)
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        taker = self._step()
        hidden, lost = moved_since(self._began, self._hidden(), self._bare, self.optimizer, self.ema)
        if lost and not self._lost:
            self._lost = True
            self.world.print(f"lockstep: note: {lost_line(lost)}")
        saved = {"own": state, "hidden": hidden, "host_draws": taker and taker.host_generators.used}
        self._writer.save(step, self.model, self.optimizer, taker and taker.scaler, self.ema, saved)
        if (failure := self._writer.failure()) is not None:
            raise failure

    def close(self) -> None:
        """Wait until the last one is on the disk. Raises UserError where that fails."""
        self._writer.close()
        self.world.barrier()
