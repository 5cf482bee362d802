"""What the user's processes record: JSON lines, a file for each process. Imports no torch.

Every line has `event`, `pid`, `t` (seconds since the start) and `at` (the user's line that it comes from, as
"train.py:41", the innermost one; "" where none is on the stack), in the order in which things happened: a `collective`
between two `step` events happened in that step. A process's rank is that of its `group` event, or else RANK's.

event       fields
process     parent (pid), rank, world and node (its machine) as the environment has them: a process's first line
group       rank, world: a process group begins
loader      loader (its number), dataset (a digest of the set behind all subsets), kind (its class), full (its length),
            length (of the loader's own set), unshortened (that before it was shortened, or null), train (the set's
            attribute, or null), batch_size, batch_sampler (a class), replicas, sampled (length of the sampler's set),
            aligned (whether that is the loader's)
pass        loader, number (from 0), epoch (of its sampler, or null): somebody begins to iterate
batch       loader, pass, number, size, ids (indices into the set behind all subsets, or null where it has none)
pass-end    loader, pass, ascending (whether indices came in the order of the loader's set): it came to its end
forward     training, grad (enabled), wrapped (the wrapper's class, or ""), size (first dimension of the first tensor),
            modal (whether it has dropout or batch norm); outermost modules with parameters alone
backward    scale (the value that it starts from, without a scaler's factor), loss (what a loss function gave last)
step        optimizer, number (from 0), lr (a list, by group); in the first steps: grads before it and weights after it
            ({name: [sum, norm]} in float64), digest (of all weights after it); in the first of a pass: begun (digest of
            the weights before it), state (how many tensors the optimizer keeps); under FSDP no weights and gradients
zero        optimizer: gradients are emptied
scheduler   scheduler (its number), lr (a list, after it), metric (what ReduceLROnPlateau gets)
wrap        kind ("ddp", "fsdp"); of DDP batch_norms (layers with their own rank's statistics)
clip        gradients are clipped
unscale     optimizer, enabled (of the scaler): called by the script
scaler-step optimizer, enabled, factor (the loss's and the gradients')
draw        what ("forward": a training pass; "data": a batch was read), states ({torch, numpy, random, cuda: digest}
            before it), drew (which of them moved); the first few in each process
collective  op, shape, group (its size), number (from 0, in this process), values (of a small tensor, before it)
loss        value (the mean over its samples), size (samples)
printed     text: a line of output with a number in it
file        path (relative to the working copy, or absolute), mode ("write", "delete"), elsewhere (outside the copy),
            refused: the first time in a process
saved       path (relative to the working copy, or absolute)
loaded      path
network     what (a host, or a command's first words), refused: a call that would leave this machine
small       kind (class), train (or null), full and length: a data set that keeps so many of its samples
stand-in    kind (a data set's class, or a file of weights), why, train: invented data in the place of what is not there
download    kind (a data set's class), root: the script asks for it
device      index, how ("set_device", "tensor", "load", ...), devices (how many are pretended): this process uses this
            GPU, once for each way to do so
waiting     stack (the user's lines, the innermost first), inside (the functions that it called, the innermost first):
            where a process was when it was ended for want of progress
cut         why ("epochs", "steps"): the script is ended here, on purpose
end         how ("done", "exit", "error"), code, error (type and text), trace (the user's lines)
"""

import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from lockstep.commands.audit.plan import Plan

Event = dict[str, Any]
_OURS = str(Path(__file__).parents[2])  # this package, which a folder of the user's may hold


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
                    self.file.write(_line(self.plan, "process", "", parent=forked) + "\n")
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


def emit(event: str, /, *, at: str | None = None, **values: Any) -> None:
    """Write one event; nothing where the process records nothing, or inside `silence`."""
    if _log is None or getattr(_quiet, "on", False):
        return
    _log.write(_line(_log.plan, event, user_line() if at is None else at, **values))


def _line(plan: Plan, event: str, at: str, **values: Any) -> str:
    head = {"event": event, "pid": os.getpid(), "t": round(time.time() - plan.started, 4), "at": at}
    return json.dumps(head | values, default=str)


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
    return "" if _log is None else line_in(_log.plan.home)


def line_in(folder: str) -> str:
    """The innermost line on the stack of a file in or below a folder, as "train.py:41"; "" where there is none."""
    frame, inside = inspect.currentframe(), folder.rstrip("/") + "/"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(inside) and "/site-packages/" not in name and not name.startswith(_OURS):
            return f"{name.removeprefix(inside)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


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


ORIGINAL = "_lockstep_original"  # of a patched function: what a TorchFunctionMode is to call, or it'd be called twice


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace `owner.name` by a function that calls `wrapper(original, *args, **kwargs)`, and looks like it."""
    original = getattr(owner, name)

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(patched, ORIGINAL, original)
    setattr(owner, name, patched)


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    """An argument by its place or its name."""
    return kwargs[name] if name in kwargs else args[place] if len(args) > place else default
