"""Random numbers: the generators' states before what draws, and whether they moved."""

import hashlib
import random
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lockstep.commands.audit.events import emit, silence
from lockstep.commands.audit.plan import Plan
from lockstep.commands.audit.recorders.patching import around

_WATCHED = 4  # passes through a model and batches read whose draws are recorded, in each process
_left = {"data": _WATCHED, "forward": _WATCHED}
_worker: list[int] = []  # of a loader, where this process is one: what it inherits is what its parent had left


def install(_plan: Plan) -> None:
    """Record what draws while samples are read; models are recorded by `watched`."""
    around(_MapDatasetFetcher, "fetch", _fetch)


def states(device: bool) -> dict[str, str]:
    """Digests of the generators' states; with the current GPU's where one is wanted."""
    numpy_state: Any = numpy.random.get_state()
    gpu = {"cuda": _digest(torch.cuda.get_rng_state().numpy().tobytes())} if device else {}
    return gpu | {
        "torch": _digest(torch.random.get_rng_state().numpy().tobytes()),
        "numpy": _digest(numpy_state[1].tobytes() + str(numpy_state[2:]).encode()),
        "random": _digest(repr(random.getstate()).encode()),
    }


def _digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()[:12]


def watched(what: str, run: Any, **told: Any) -> Any:
    """`run()`, and in the first of its kind an event `draw` with the states before, and which of them moved."""
    if _left[what] <= 0:
        return run()
    _left[what] -= 1
    gpu = what == "forward" and torch.cuda.is_available()  # loader workers may not touch one
    with silence():
        before = states(gpu)
    try:
        return run()
    finally:
        with silence():
            moved = [name for name, state in states(gpu).items() if state != before[name]]
        emit("draw", what=what, states=before, drew=moved, **told)


def _fetch(original: Any, fetcher: Any, indices: Any) -> Any:
    worker = get_worker_info()
    if worker is not None and _worker != [worker.id]:
        _worker[:] = [worker.id]
        _left["data"] = _WATCHED
    told = {"worker": None if worker is None else worker.id}
    return watched("data", lambda: original(fetcher, indices), **told)
