"""How the launchers of a run meet, one on each machine: torch's elastic launcher by a rendezvous of our own."""

import errno
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lockstep.config import Execution
from lockstep.errors import UserError
from lockstep.processes.listening import LOOPBACK, listen_at, serve_store, shown

_RENDEZVOUS = "lockstep"


class StaticRendezvous(RendezvousHandler):
    """How the launchers of a run meet, one on each machine, whose numbers are given.

    In torch's elastic rendezvous launchers unpickle what they find in a store that anybody can write to. Here they
    read no more there than numbers and JSON.
    """

    def __init__(self, execution: Execution, listener: socket.socket | None) -> None:
        self.execution, self.listener = execution, listener  # which is machine 0's
        self.host = execution.master_addr if execution.nnodes > 1 else LOOPBACK
        self.port = listener.getsockname()[1] if listener else execution.master_port
        self.listens = shown(listener) if listener else ""
        self.store: Store | None = None

    def get_backend(self) -> str:
        """Its name."""
        return _RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        """The workers meet in the launchers' store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet; raises torch's DistError where the others don't come in time."""
        nodes, limit = self.execution.nnodes, timedelta(seconds=self.execution.collective_timeout)
        if self.store is None and self.listener is not None:
            self.store = serve_store(self.listener, nodes, nodes > 1, limit)
        elif self.store is None:
            self.store = TCPStore(self.host, self.port, nodes, False, limit)
        meeting = RendezvousStoreInfo(self.host, self.port)
        return RendezvousInfo(self.store, self.execution.node_rank, nodes, meeting)

    def is_closed(self) -> bool:
        """Never: a restart makes another one."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """The name of the run, which has its store for itself."""
        return _RENDEZVOUS

    def shutdown(self) -> bool:
        """The store goes with the launcher."""
        return True


def meeting_place(execution: Execution) -> StaticRendezvous:
    """Where the launchers of a run meet; machine 0 listens from now on.

    Raises:
        UserError: where --master-port is taken.
    """
    listener = None
    if execution.node_rank == 0:
        host = execution.master_addr if execution.nnodes > 1 else LOOPBACK
        try:
            listener = listen_at(host, execution.master_port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise UserError(
                f"--master-port {execution.master_port} is in use on this machine"
                if taken
                else f"--master-port {execution.master_port} can't be opened on this machine: {error.strerror}",
                "Name another." if execution.nnodes > 1 else "Leave the flag out, or name another.",
            ) from error
    return StaticRendezvous(execution, listener)


def _given(parameters: RendezvousParameters) -> RendezvousHandler:
    handler = parameters.config["handler"]
    assert isinstance(handler, StaticRendezvous)
    return handler


def rendezvous_by(handler: StaticRendezvous) -> dict[str, Any]:
    """The entries of torch's LaunchConfig by which launchers meet so."""
    rendezvous_handler_registry.register(_RENDEZVOUS, _given)
    endpoint = f"{handler.host}:{handler.port}"
    return {"rdzv_backend": _RENDEZVOUS, "rdzv_endpoint": endpoint, "rdzv_configs": {"handler": handler}}
