"""What the user's processes record: JSON lines, a file for each process. Imports no torch.

Every line has `event`, `pid`, `t` (seconds since the start) and `at` (the user's line that it comes from, as
"train.py:41", the innermost one; "" where none is on the stack). Lines stand in the order in which they happened in
that process: a `sync` between two `step` events happened in that step. Which rank a process was, records.py tells
from its `group` event, or else from RANK.

event       fields
process     parent (pid), rank and world (as the environment has them, or null), worker (a loader's worker's number, or
            null), node (its machine's number); a process's first line
group       rank, world, backend (as the user wrote it), init_method, port (MASTER_PORT), own_port (whether the script
            set it): a process group was made; what came in the script's arguments is told as if left out
group-end   it was destroyed
dataset     id, kind (class), length, full (its length before it was made small), train (true, false, null: unknown)
loader      loader (its number), dataset (a digest of the set behind all subsets), kind (its class), full (its length),
            length (of the loader's own set), unshortened (that before it was made small, or null), train (the set's
            attribute, or null), batches, batch_size, drop_last, workers, sampler and batch_sampler (classes), replicas,
            sampler_rank, sampled (length of the sampler's set), aligned (whether that is the loader's), first (of
            a part that is the first of its set: samples, classes in it and in the set)
pass        loader, number (from 0), epoch (that its sampler was told, or null): somebody began to iterate
batch       loader, pass, number, size, ids (indices into the set behind all subsets, or null where it has none)
pass-end    loader, pass, batches, ascending (whether indices came in the order of the loader's set): it came to its
            end
forward     model, training, grad (enabled), wrapped (the wrapper's class, or ""), size (first dimension of the
            first tensor), sync (false inside no_sync), modal (whether it has dropout or batch norm), devices (of the
            parameters); outermost modules with parameters alone
backward    scale (the value that it starts from, without a scaler's factor), loss (what a loss function gave last),
            sync (false inside no_sync)
step        optimizer, number (from 0), lr (a list, by group); in the first steps: grads before it and weights after it
            ({name: [sum, norm]} in float64), digest (of all weights after it); in the first of a pass: begun (digest of
            the weights before it), state (how many tensors the optimizer keeps); under FSDP weights, grads and digest
            are empty, and there is shards ({name: [sum, norm, over how many ranks the tensor is cut]})
zero        optimizer: gradients are emptied
scheduler   scheduler (its number), kind, lr (a list, after it), metric (that ReduceLROnPlateau is given)
mode        model, training: train() or eval() was called
wrap        kind "ddp": find_unused, devices (of the parameters), batch_norms, sync_batch_norms (how many);
            kind "fsdp" also begun (digest of the weights before they are cut; "" where there are none, or a broadcast
            follows); kind "syncbn" (converted): wrapped (whether by DDP before), batch_norms, sync_batch_norms
clip        kind
unscale     optimizer, enabled (of the scaler): called by the script
scaler-step optimizer, enabled, factor (the loss's and the gradients')
draw        what ("forward": a training pass; "data": a batch was read, then worker), states ({torch, numpy, random,
            cuda: digest} before it), drew (which of them moved); the first few in each process
collective  op, shape, dtype, reduce, group (its size), number (from 0, in this process), values (of a small tensor,
            before it)
reduced     number, values: what the tensor holds after it
loss        value (the mean over its samples), size (samples), learns (whether it has gradients)
told        text: a line that the script has written, with a number in it
normalised  low, high (of the pixels given), mean, spread (of what they become): by a transform, the first ones
sync        kind ("item", "cpu", "tolist", "bool", "print"): the host waits for the device
file        path (relative to the working copy, or absolute), mode ("write", "delete"), elsewhere (outside the copy),
            refused: the first time in a process
saved       path (relative to the working copy, or absolute), kind ("weights", "dict" or a class), keys (the first
            ones of a dict), module (whether names of weights begin with "module.")
loaded      path, map_location, weights_only
network     what (a host, or a command's first words), refused: a call that would leave this machine
small       kind (class), train (or null), full and length: a data set that keeps so many of its samples
stand-in    kind (a data set's class, or a file of weights), why, train: made-up data in the place of what is not there
download    kind (a data set's class), root: the script asked for it
device      index, how ("set_device", "tensor", "DistributedDataParallel", "init_process_group", "barrier", "load",
            "DataParallel", "Generator"), devices (how many are pretended): this process uses this GPU, once for each
            way of saying so
waiting     stack (the user's lines, the innermost first), inside (the functions that it called, the innermost first):
            where a process was when it was ended for want of progress
cut         why ("epochs", "steps"): the harness ended the script here, on purpose
end         how ("done", "exit", "error"), code, error (type and text), trace (the user's lines)
"""

import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lockstep.commands.audit.plan import Plan

Event = dict[str, Any]


class _Log:
    """The open file of this process; a forked child opens its own."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pid = 0
        self.file: TextIO | None = None
        self.lock = threading.RLock()

    def write(self, line: str) -> None:
        with self.lock:
            if self.file is None or self.pid != os.getpid():
                forked, self.pid = self.pid, os.getpid()
                self.file = (Path(self.plan.events) / f"{self.pid}.jsonl").open("a", encoding="utf-8")
                if forked:
                    self.file.write(_line(self.plan, "process", "", parent=forked, worker=_worker()) + "\n")
            self.file.write(line + "\n")
            self.file.flush()  # a killed process leaves what it had


_log: _Log | None = None
_quiet = threading.local()


def begin(plan: Plan, **values: Any) -> None:
    """Open this process's record, and write its first line."""
    global _log
    _log = _Log(plan)
    os.register_at_fork(after_in_child=_forked)
    emit("process", parent=os.getppid(), **values)


def _forked() -> None:
    if _log is not None:
        _log.lock = threading.RLock()


def emit(event: str, told: dict[str, Any] | None = None, *, at: str | None = None, **values: Any) -> None:
    """Write one event; nothing where the process records nothing, or inside `silence`."""
    if _log is None or getattr(_quiet, "on", False):
        return
    _log.write(_line(_log.plan, event, user_line() if at is None else at, **(told or {}), **values))


def _line(plan: Plan, event: str, at: str, **values: Any) -> str:
    head = {"event": event, "pid": os.getpid(), "t": round(time.time() - plan.started, 4), "at": at}
    return json.dumps(head | values, default=str)


def _worker() -> int | None:
    """The number of this process as a worker of a data loader."""
    loading = sys.modules.get("torch.utils.data")
    info = loading.get_worker_info() if loading else None
    return info.id if info else None


@contextmanager
def silence() -> Iterator[None]:
    """What the harness itself calls inside is not recorded."""
    before = getattr(_quiet, "on", False)
    _quiet.on = True
    try:
        yield
    finally:
        _quiet.on = before


def user_line() -> str:
    """The innermost line of the user's on the stack, as "train.py:41"; "" where there is none."""
    frames = user_frames(1)
    return frames[0] if frames else ""


def user_frames(most: int = 8) -> list[str]:
    """The user's lines on the stack, the innermost first."""
    if _log is None:
        return []
    found, frame, home = list[str](), inspect.currentframe(), _log.plan.home.rstrip("/") + "/"
    while frame is not None and len(found) < most:
        name = frame.f_code.co_filename
        if name.startswith(home):
            found.append(f"{name.removeprefix(home)}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def gather(folder: Path) -> dict[int, list[Event]]:
    """The events of all processes, by process id, in their order; a line that was cut off is left out."""
    found = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        events = list[Event]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        found[int(path.stem)] = events
    return found
