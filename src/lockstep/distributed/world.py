"""The processes of a run, as one of them sees it: its rank, and the collectives."""

import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional  # the defaults of its functions are a group: not a pretended one, later
from torch import Tensor

from lockstep.config import Execution
from lockstep.distributed.devices import keep_freed, rank_device
from lockstep.distributed.environment import launcher_ranks, restore_variables
from lockstep.distributed.failures import is_peer_gone
from lockstep.distributed.output import for_people, status
from lockstep.distributed.proc import threads_each
from lockstep.distributed.rendezvous import choose_interface, different, keep_to_loopback, open_store, versions
from lockstep.errors import PeerError, UserError, reason, shown

_LAST_RELEASES_S = 0.1
_AT_ONCE = 1024  # bytes of a value that `gather` sends in one collective; a longer one takes two


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them. Its size decides who does which share, and nothing else."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> "World":
        """A world of one process, without a process group."""
        return cls(0, 1, 0, 1, torch.device(device), "none")

    def shard(self, n: int) -> slice:
        """This rank's contiguous part of n things. Sizes differ by at most one; the first ranks get the larger ones."""
        return shard_of(n, self.rank, self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def rows(self, mine: Tensor) -> Tensor:
        """Every rank's vector [n], one a row: [ranks, n] on the device. The others add zeros: nothing is rounded."""
        table = torch.zeros(self.size, len(mine), dtype=mine.dtype, device=self.device)
        table[self.rank] = mine
        return self.sum(table)

    def largest(self, values: list[int]) -> list[int]:
        """The largest over all ranks of each of a few integers, through the host."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def barrier(self) -> None:
        """Wait for all ranks, at most as long as the run's --collective-timeout."""
        if self.size > 1:
            dist.barrier(device_ids=None if self.backend == "gloo" else [self.device.index])

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on all ranks (for small ones: they go through the host).

        A value is JSON's: text, numbers, None, lists and dicts with text for keys. A pickle, as torch's own collectives
        for objects send it, would be code for whoever gets at the connection to run.
        """
        try:
            content = json.dumps(value).encode()
        except TypeError as error:
            raise UserError(f"world.gather: {error}", "Give it numbers, text and lists, as tensor.tolist().") from error
        if self.size == 1:
            return [json.loads(content)]
        fits = len(content) <= _AT_ONCE
        rows = self._rows(content if fits else b"#%d" % len(content), _AT_ONCE)
        if any(row.startswith(b"@") for row in rows):
            raise _parted(rows)
        if longest := max((int(row[1:]) for row in rows if row.startswith(b"#")), default=0):
            rows = self._rows(content, longest)
        return [json.loads(row) for row in rows]

    def meet(self, place: str) -> Callable[[], None]:
        """Say in the background where this rank is. What it returns raises UserError where others are elsewhere.

        A `gather` of theirs is answered by it, so that nobody waits for the other, or is sent more than it takes.
        """
        if self.size == 1:
            return lambda: None
        mine = torch.frombuffer(bytearray(f"@{place}".encode().ljust(_AT_ONCE)), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(rows, mine, async_op=True)

        def compare() -> None:
            work.wait()
            found = [row.numpy().tobytes() for row in rows]
            if any(theirs != found[0] for theirs in found):
                raise _parted(found)

        return compare

    def by_first(self, make: Callable[[], Any]) -> Any:
        """What a function returns on rank 0, which JSON must have, on all ranks. Its UserError is raised there, and
        PeerError on the others."""
        value, failure = None, None
        if self.rank == 0:
            try:
                value = make()
            except UserError as error:
                failure = error
        value, reason = self.gather([value, failure and failure.message])[0]
        if reason is not None:
            raise failure or PeerError(f"rank 0: {reason}")
        return value

    def _rows(self, content: bytes, length: int) -> list[bytes]:
        """Every rank's bytes, padded by spaces."""
        mine = torch.frombuffer(bytearray(content.ljust(length)), dtype=torch.uint8)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return [row.numpy().tobytes() for row in rows]

    def require_same(self, mine: Mapping[str, str]) -> None:
        """Compare values by their names, on all ranks together; UserError on all of them names what differs, where."""
        everyone = self.gather({"host": socket.gethostname(), "values": dict(mine)})
        places = [f"rank {rank} ({each['host']})" for rank, each in enumerate(everyone)]
        if error := different([each["values"] for each in everyone], places):
            raise error

    def print(self, *values: object) -> None:
        """Print on rank 0 alone; names of classes and files as a terminal may show them."""
        if self.rank == 0:
            print(for_people(" ".join(shown(str(value), keep="\n") for value in values), sys.stdout), flush=True)

    def status(self, what: str) -> None:
        """Say on rank 0's terminal what is being waited for, until anything is printed."""
        if self.rank == 0:
            status(what)

    @contextmanager
    def first_on_host(self) -> Iterator[None]:
        """Run the body on the first rank of each host, then on the other ranks, which find the work done.

        Where a host's first rank failed, all other ranks raise PeerError.
        """
        if self.local_rank == 0:
            try:
                yield
            except BaseException:
                self.gather(True)
                raise
        if True in (failed := self.gather(False)):
            raise PeerError(f"rank {failed.index(True)} failed")
        if self.local_rank > 0:
            yield


def _parted(rows: list[bytes]) -> UserError:
    """The refusal where ranks meet at different places, by what each has sent."""
    places = [row[1:].decode().strip() if row.startswith(b"@") else "a world.gather" for row in rows]
    other = next(rank for rank, theirs in enumerate(places) if theirs != places[0])
    return UserError(
        f"the processes no longer take the same steps: rank 0 is at {places[0]}, rank {other} is at {places[other]}",
        "All of them step and evaluate, also where rank 0 alone prints. A `break` or `continue` must be the same on "
        "all: decide by a number that is, as the loss that step(batch) returns, not by one process's samples.",
    )


class _MadeWhenAsked(c10d._World):
    """torch's groups, whose default one is made by the first question for it, which most models never put."""

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self._make, self._lock = [make], threading.RLock()
        self.made: dist.ProcessGroup | None = None

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        dynamo = sys.modules.get("torch._dynamo")
        with self._lock:
            # as it is imported, it imports modules that ask for a default, and a new group asks for trace_rules
            if self._make and (dynamo is None or hasattr(dynamo, "trace_rules")):
                self._make.pop()()
            return self.made

    @default_pg.setter
    def default_pg(self, value: dist.ProcessGroup | None) -> None:
        self.made = value


@contextmanager
def pretended_rank(rank: int, size: int) -> Iterator[None]:
    """Within, a process finds itself rank `rank` of `size`, by torch and by the environment, whatever it is.

    Collectives return at once, as if the other ranks had brought nothing; the first one takes about a millisecond. Of a
    `size` of 0 it is alone: there is no group, and no launcher has started it.
    """
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = {name: os.environ.get(name) for name in names}
    for name, number in names.items():
        os.environ[name] = str(number)
        if not size:
            del os.environ[name]

    def make() -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if size:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)

    real, hook = c10d._world, sys.excepthook
    count = real.group_count  # of groups so far: the number names the next one, and has to be the same on all ranks
    c10d._world = groups = _MadeWhenAsked(make)
    try:
        yield
    finally:
        c10d._world = real
        if groups.made is not None:
            c10d._update_default_pg(real.default_pg)
            dist.destroy_process_group(groups.made)
            real.group_count = count
            sys.excepthook = hook  # torch wraps it, to put the rank before each line
        restore_variables(before)


@contextmanager
def pretended_process(number: int) -> Iterator[None]:
    """Within, os.getpid() ends in that number's nine bits, for this thread alone: what a model makes of it shows. Above
    them is this process's own id: a file that is named by it is nobody else's."""
    before, thread = os.getpid, threading.get_ident()
    pretended = (_getpid() << 9) + number % 512  # below 2**32, as a seed has to be
    os.getpid = lambda: pretended if threading.get_ident() == thread else _getpid()
    try:
        yield
    finally:
        os.getpid = before


_getpid = os.getpid


def shard_of(n: int, rank: int, size: int) -> slice:
    """Rank's contiguous part of n things among `size` ranks, as `World.shard`."""
    base, larger = divmod(n, size)
    start = rank * base + min(rank, larger)
    return slice(start, start + base + (rank < larger))


@contextmanager
def join(execution: Execution, environ: MutableMapping[str, str] = os.environ) -> Iterator[World]:
    """Join the run that the environment describes (torchrun's variables, mpirun's or srun's), or be a world of one.

    Sets the process's CPU threads, its current device and, where it trains on the CPU, that freed memory is kept; seeds
    Python's and numpy's generators alike in all processes and runs, as torch's own is; leaves the process group at the
    end. Raises UserError for a torn environment, a missing device or a group that does
    not come together, PeerError where another rank went away before all had met.
    """
    rank, size, local_rank, local_size = launcher_ranks(environ) or (0, 1, 0, 1)
    device = rank_device(execution, local_rank, local_size)
    torch.set_num_threads(threads_each(execution.threads, local_size))
    random.seed(0)
    np.random.seed(0)
    if device.type == "cpu":
        keep_freed()
    else:
        torch.accelerator.set_device_index(device.index or 0)
    if size == 1:
        yield World(rank, size, local_rank, local_size, device, "none")
        return
    backend = execution.backend if execution.backend != "auto" else dist.get_default_backend_for_device(device)
    names = backend if backend == "gloo" or device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    limit = timedelta(seconds=execution.collective_timeout)
    try:
        store = open_store(environ, rank, size, local_size, execution.collective_timeout)
        if local_size == size:
            keep_to_loopback(environ)
        else:
            choose_interface(store, environ["MASTER_ADDR"], rank, size, environ)
        dist.init_process_group(names, timeout=limit, store=store, rank=rank, world_size=size)
        world = World(rank, size, local_rank, local_size, device, backend)
        world.largest([rank])  # who leaves before the last one has connected would seem to have died
        if local_size < size:
            world.require_same(versions() | {"--device with --backend": names})
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        if is_peer_gone(error):  # it had come, and was killed or told to end: no mistake in what was given here
            raise PeerError(f"while they met: {reason(error)}") from error
        raise UserError(
            f"rank {rank} of {size} could not meet the others at "
            f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}",
            "Check that the address is machine 0's, the port is free and open, and that all processes were started.",
        ) from error
    yield world
    # Not after an error: an orderly goodbye would wait for the others. The process ends, the launcher stops the rest.
    dist.destroy_process_group()
    # gloo's threads outlive the group, which DDP never lets go, and need the interpreter's lock to release the last
    # collective's tensors: one that waits for it while the interpreter ends aborts the process. Sleep gives it away.
    time.sleep(_LAST_RELEASES_S)
