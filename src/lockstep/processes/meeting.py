"""How the launchers of a run meet, one on each machine, whose numbers are given: by a store on machine 0.

What they read there is numbers. Torch's elastic rendezvous would unpickle what anybody put into the store.
"""

import errno
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, Store, TCPStore

from lockstep.config import Execution
from lockstep.errors import UserError
from lockstep.processes.listening import LOOPBACK, STORE, listen_at, serve_store, shown
from lockstep.processes.signals import Notes, exit_by

_LOOK_S = 0.05
_GOODBYE_S = 30.0  # that machine 0 keeps the store for others, at the end


@dataclass(frozen=True)
class Meeting:
    """The store of a run, and which of its ranks are on this machine."""

    store: Store
    environ: dict[str, str]  # of every worker of this machine
    first_rank: int
    size: int

    def worker_environ(self, local_rank: int) -> dict[str, str]:
        """torchrun's variables for one of this machine's workers."""
        rank = str(self.first_rank + local_rank)
        return {**self.environ, "RANK": rank, "LOCAL_RANK": str(local_rank)}


def meet(execution: Execution, count: int, notes: Notes) -> Meeting:
    """Meet the launchers of the other machines, of which each starts `count` workers of its own.

    Raises:
        UserError: where --master-port is taken, or the others did not come in time.
    """
    nodes, node, seconds = execution.nnodes, execution.node_rank, execution.collective_timeout
    host, listens = (execution.master_addr if nodes > 1 else LOOPBACK), ""
    place = f"{host}:{execution.master_port}"
    try:
        if node == 0:
            listener = _listener(host, execution)
            listens = shown(listener)
            store = serve_store(listener, nodes, False, timedelta(seconds=seconds))
        else:
            store = TCPStore(host, execution.master_port, nodes, False, timedelta(seconds=seconds))
        store.set(f"lockstep/machine/{node}", str(count))
        _await(store, "machine", nodes, seconds, notes)
        counts = [int(store.get(f"lockstep/machine/{each}")) for each in range(nodes)]
    except (DistError, RuntimeError) as error:
        raise UserError(
            f"machine {node} of {nodes} did not meet the others at {place} in {seconds:g} s: {error}",
            "Check that the address is machine 0's, the port is open, and the command runs on every machine.",
        ) from error
    environ = {
        "WORLD_SIZE": str(sum(counts)),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the store is there, rank 0 need not open it
        STORE: listens,
    }
    return Meeting(store, environ, sum(counts[:node]), sum(counts))


def part(execution: Execution, store: Store, notes: Notes) -> None:
    """Where all went well: machine 0 keeps its store until the workers of the others have ended too."""
    if execution.nnodes > 1:
        try:
            store.set(f"lockstep/parted/{execution.node_rank}", "")
            if execution.node_rank == 0:
                _await(store, "parted", execution.nnodes, _GOODBYE_S, notes)
        except (DistError, RuntimeError):
            return  # machine 0 has waited long enough, or another one was cut off: its launcher tells


def _await(store: Store, what: str, nodes: int, seconds: float, notes: Notes) -> None:
    """Wait until each machine has left its word; by looking, so that signals are heard."""
    until = time.monotonic() + seconds
    while missing := [str(node) for node in range(nodes) if not store.check([f"lockstep/{what}/{node}"])]:
        if asked := notes.take():
            raise exit_by(asked[0])
        if time.monotonic() > until:
            raise DistError(f"machine(s) {', '.join(missing)} did not come")
        time.sleep(_LOOK_S)


def _listener(host: str, execution: Execution) -> socket.socket:
    try:
        return listen_at(host, execution.master_port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"--master-port {execution.master_port} is in use on this machine"
            if taken
            else f"--master-port {execution.master_port} can't be opened on this machine: {error.strerror}",
            "Name another." if execution.nnodes > 1 else "Leave the flag out, or name another.",
        ) from error
