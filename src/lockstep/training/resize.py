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
from lockstep.distributed.devices import choice, choose, process_count
from lockstep.distributed.environment import launcher_ranks
from lockstep.distributed.rendezvous import STORE
from lockstep.distributed.resize import LAUNCHER, answer, places, read_request
from lockstep.distributed.signals import again
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.assemble import Run
from lockstep.training.resume import carried

_WAIT_S = 10.0  # for a checkpoint that is being written, before training waits for it


def wishes(
    config: Config, world: World, run: Run, folder: Path, writer: Writer | None, say: Callable[[str], object]
) -> Callable[[], int]:
    """A function for rank 0, called at step boundaries: how many processes shall go on; 0: these.

    It refuses what can't be had. While a checkpoint is being written, training goes on. `say`: called with what
    came of SIGUSR2.
    """
    since, chosen = 0.0, 0  # when a wish was first kept waiting; what SIGUSR2 has come to
    choose_again = _by_signal(config, world, run, say)

    def wish() -> int:
        nonlocal since, chosen
        if (fresh := choose_again()) is not None:
            chosen = fresh
        nproc = chosen or _asked_for(config, world, run, folder)
        if not nproc:
            return 0
        if writer is not None and writer.busy and time.monotonic() - (since or time.monotonic()) < _WAIT_S:
            since = since or time.monotonic()
            return 0
        since, chosen = 0.0, 0
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


def _by_signal(config: Config, world: World, run: Run, say: Callable[[str], object]) -> Callable[[], int | None]:
    """A function that chooses within --nproc MIN:MAX where SIGUSR2 has come; 0: these go on, None: it has not come."""
    looks: list[proc.Load] = []  # at what others do, since the signal came
    execution = config.execution

    def choose_again() -> int | None:
        if not again.waits:
            return None
        if execution.nproc_range is None:
            again.chosen = time.monotonic()
            say(f"SIGUSR2 changes nothing: --nproc {execution.nproc} is no range, as 1:4, to choose from")
            return 0
        if not looks:
            looks.append(proc.Load(int(os.environ.get(LAUNCHER, os.getpid()))))
        if (load := looks[0].cores()) is None:
            return None
        looks.clear()
        again.chosen = time.monotonic()
        least, most = execution.nproc_range
        nproc = choose(
            proc.cores(), load, least, most, execution.threads, lambda count: objection(config, world, run, count)
        )
        if nproc == world.size:
            say(f"SIGUSR2: stays on {nproc} process(es): {choice(load, execution)}")
        elif why := objection(config, world, run, nproc):
            say(f"SIGUSR2 changes nothing: {why}")
        else:
            say(f"SIGUSR2: goes on with {nproc} process(es): {choice(load, execution)}")
            return nproc
        return 0

    return choose_again


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
