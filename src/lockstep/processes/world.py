"""The processes of a run, as one of them sees it: its rank, and the collectives."""

import json
import os
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from lockstep.config import Execution
from lockstep.errors import PeerError, UserError, reason
from lockstep.processes.devices import device_identity, rank_device, require_apart
from lockstep.processes.environment import JOB, launcher_ranks
from lockstep.processes.failures import is_peer_gone
from lockstep.processes.listening import LOOPBACK, keep_to_loopback
from lockstep.processes.memory import keep_freed
from lockstep.processes.output import status
from lockstep.processes.proc import threads_each
from lockstep.processes.rendezvous import choose_interface, fresh_store, open_store

_LAST_RELEASES_S = 0.1


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

    def share(self, n: int) -> slice:
        """This rank's contiguous part of n things. Sizes differ by at most one; the first ranks get the larger ones."""
        return share_of(n, self.rank, self.size)

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
        content = json.dumps(value).encode()
        if self.size == 1:
            return [json.loads(content)]
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(text)
        dist.all_reduce(sizes)
        table = torch.zeros(self.size, int(sizes.max()), dtype=torch.uint8)
        table[self.rank, : len(text)] = text
        dist.all_gather(list(table.unbind()), table[self.rank].clone())
        return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(table, sizes.tolist(), strict=True)]

    def print(self, *values: object) -> None:
        """Print on rank 0 alone."""
        if self.rank == 0:
            print(*values, flush=True)

    def status(self, what: str) -> None:
        """Say on rank 0's terminal what is being waited for, until anything is printed."""
        if self.rank == 0:
            status(what)

    @contextmanager
    def first_on_host(self) -> Iterator[None]:
        """Run the body on the first rank of each host, then on the other ranks, which find the work done.

        Raises:
            PeerError: on the waiting ranks, where a host's first rank failed.
        """
        if self.local_rank > 0:
            self._raise_if_any_failed(self.gather(False))
            yield
            return
        try:
            yield
        except BaseException:
            self.gather(True)
            raise
        self._raise_if_any_failed(self.gather(False))

    def _raise_if_any_failed(self, failed: list[bool]) -> None:
        if any(failed):
            raise PeerError(f"rank {failed.index(True)} failed")


def share_of(n: int, rank: int, size: int) -> slice:
    """Rank's contiguous part of n things among `size` ranks, as `World.share`."""
    base, larger = divmod(n, size)
    start = rank * base + min(rank, larger)
    return slice(start, start + base + (rank < larger))


@contextmanager
def join(execution: Execution, environ: MutableMapping[str, str] = os.environ) -> Iterator[World]:
    """Join the run that the environment describes (torchrun's variables, mpirun's or srun's), or be a world of one.

    Sets the process's CPU threads, its current device and, where it trains on the CPU, that freed memory is kept;
    leaves the process group at the end.

    Raises:
        UserError: for a torn environment, a missing device, or a group that does not come together.
        PeerError: where another rank went away before all had met.
    """
    rank, size, local_rank, local_size = launcher_ranks(environ) or (0, 1, 0, 1)
    device = rank_device(execution, local_rank, local_size)
    torch.set_num_threads(threads_each(execution.threads, local_size))
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
        store = _store(environ, rank, size, local_size == size, execution.collective_timeout)
        if local_size == size:
            keep_to_loopback(environ)
        else:
            choose_interface(store, environ["MASTER_ADDR"], rank, size, environ)
        dist.init_process_group(names, timeout=limit, store=store, rank=rank, world_size=size)
        world = World(rank, size, local_rank, local_size, device, backend)
        world.largest([rank])  # who leaves before the last one has connected would seem to have died
        if device.type != "cpu" and backend != "gloo":
            require_apart(world.gather(device_identity(device)))
    except (dist.DistError, RuntimeError, ValueError) as error:
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


def _store(environ: MutableMapping[str, str], rank: int, size: int, one_host: bool, seconds: float) -> Store:
    """The store of the ranks of this attempt."""
    if job := environ.get(JOB):
        host = LOOPBACK if one_host else environ["MASTER_ADDR"]
        return open_store(job, host, rank, size, seconds)
    found, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=seconds)))
    return fresh_store(found, rank, size, seconds)
