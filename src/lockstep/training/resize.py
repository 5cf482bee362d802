"""Handing a run over to another number of processes: whether it can be, and its state written for them."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.checkpoint.store import Snapshot, folder_name, write
from lockstep.checkpoint.writer import Writer
from lockstep.config import Config
from lockstep.distributed import proc
from lockstep.distributed.devices import process_count
from lockstep.distributed.environment import launcher_ranks
from lockstep.distributed.rendezvous import STORE
from lockstep.distributed.resize import answer, places, read_request
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import Run
from lockstep.training.resume import carried

_WAIT_S = 10.0  # for a checkpoint that is being written, before training waits for it


def wishes(config: Config, world: World, run: Run, folder: Path, writer: Writer | None) -> Callable[[], int]:
    """A function for rank 0, called at step boundaries: how many processes shall go on; 0: these.

    It refuses what can't be had. While a checkpoint is being written, training goes on.
    """
    since = 0.0  # when a wish was first kept waiting

    def wish() -> int:
        nonlocal since
        if not (nproc := _asked_for(config, world, run, folder)):
            return 0
        if writer is not None and writer.busy and time.monotonic() - (since or time.monotonic()) < _WAIT_S:
            since = since or time.monotonic()
            return 0
        since = 0.0
        return nproc

    return wish


def _asked_for(config: Config, world: World, run: Run, folder: Path) -> int:
    """How many processes a request in the run folder wants; 0: none does, or that is answered."""
    request = read_request(folder)
    if request is None or not request.waits:
        return 0
    if request.nproc == world.size:
        answer(folder, request, f"runs on {world.size} process(es) already", done=True)
    elif why := objection(config, world, run, request.nproc):
        answer(folder, request, why)
    else:
        return request.nproc
    return 0


def objection(config: Config, world: World, run: Run, nproc: int) -> str:
    """Why the run can't go on with so many processes; empty where it can."""
    if launcher_ranks() and STORE not in os.environ:
        return "another launcher (torchrun, mpirun, srun) started its ranks, and decides how many there are"
    if world.local_size < world.size:
        return "it is on several machines, each of which has a launcher of its own"
    try:
        process_count(config.with_execution(nproc=nproc).execution)
        proc.require_room(nproc, config.execution.threads, config.execution.workers)
    except UserError as error:
        return error.message
    lost = carried(run)[1]
    return f"training moves {', '.join(lost[:3])}, which can't be handed over" if lost else ""


def keep(taken: Snapshot) -> Path:
    """Write a snapshot for the processes to come; returns its folder. Raises UserError where there is no place."""
    size = sum(tensor.nbytes for tensors in taken.tensors.values() for tensor in tensors.values())
    failed = UserError(f"neither /dev/shm nor TMPDIR has {size / 2**20:,.0f} MiB free")
    for place in places(size):
        try:
            write(taken, place)
            return place / folder_name(taken.step)
        except UserError as error:
            failed = error
            shutil.rmtree(place, ignore_errors=True)
    raise failed
