"""How the ranks of a job find each other where no port is named, and what they settle before they form a group.

A job has a sequence of ports of its own, by its name. At the first free one rank 0 answers those that send the job's
name with the port of its store.
"""

import hashlib
import socket
import threading
import time
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import PrefixStore, Store, TCPStore

from lockstep.errors import UserError
from lockstep.processes.listening import listen_at, serve_store
from lockstep.processes.network import address_towards, interface_of

_PORTS, _FIRST_PORT, _LAST_PORT = 16, 15_000, 32_000  # below those that systems hand out for outgoing connections
_ASK_S, _PAUSE_S, _LINE = 2.0, 0.1, 512
_POLL_S = 0.02
INTERFACE = "GLOO_SOCKET_IFNAME"


def ports(job: str) -> list[int]:
    """The ports at which a job's rank 0 may listen, in its order."""
    span = _LAST_PORT - _FIRST_PORT
    draws = (hashlib.sha256(f"{job}/{i}".encode()).digest() for i in range(_PORTS))
    return [_FIRST_PORT + int.from_bytes(draw[:4], "big") % span for draw in draws]


def open_store(job: str, host: str, rank: int, size: int, seconds: float) -> Store:
    """The store of a job's ranks, which rank 0 opens and the others find.

    Raises:
        UserError: where all ports of the job are taken, or rank 0 was not found in time.
    """
    limit = timedelta(seconds=seconds)
    if rank == 0:
        store = serve_store(listen_at(host, 0), size, False, limit)
        _serve_port(job, host, store.port, size - 1)
        return store
    return TCPStore(host, _find_port(job, host, rank, size, seconds), size, wait_for_workers=False, timeout=limit)


def _serve_port(job: str, host: str, port: int, ranks: int) -> None:
    """At the first of the job's ports that is free, give so many ranks that ask for the job the port of its store."""
    for own in ports(job):
        try:
            listener = listen_at(host, own)
            break
        except OSError:
            continue  # somebody else's
    else:
        raise UserError(
            f"rank 0 can listen at none of the ports {', '.join(map(str, ports(job)))}",
            "Set MASTER_PORT, the same for all ranks.",
        )

    def serve() -> None:
        left = ranks
        with listener:
            while left:
                connection, _ = listener.accept()
                with connection, suppress(OSError):  # it went away
                    connection.settimeout(_ASK_S)
                    if connection.recv(_LINE) == job.encode():
                        connection.sendall(str(port).encode())
                        left -= 1

    threading.Thread(target=serve, name="lockstep-rendezvous", daemon=True).start()


def _find_port(job: str, host: str, rank: int, size: int, seconds: float) -> int:
    """The port of the job's store. Another program at one of the job's ports answers nothing, or something else."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for port in ports(job):
            try:
                with socket.create_connection((host, port), _ASK_S) as connection:
                    connection.sendall(job.encode())
                    answer = connection.recv(_LINE)
            except OSError:
                continue
            if answer.isdigit():
                return int(answer)
        time.sleep(_PAUSE_S)
    raise UserError(
        f"rank {rank} of {size} did not find rank 0 at {host} in {seconds:g} s",
        "Check that the host's name is right and reachable (MASTER_ADDR names another), and that rank 0 was started.",
    )


def fresh_store(store: Store, rank: int, size: int, seconds: float) -> Store:
    """A part of the store that holds nothing of ranks before these.

    An elastic launcher keeps one store over all its restarts. What is left in it, addresses or an alarm, would be taken
    for current. Its count of restarts names no attempt: a host that joins later counts from 0.

    Raises:
        UserError: where not all ranks came in time.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"lockstep/here/{rank}", token)
        attempt = store.get(f"lockstep/attempt/{token}").decode()
        store.set(f"{attempt}/joined/{rank}", "")
        return PrefixStore(attempt, store)
    attempt = f"lockstep/{uuid.uuid4().hex}"
    until, missing = time.monotonic() + seconds, set(range(1, size))
    while missing:
        for other in [r for r in missing if store.check([f"lockstep/here/{r}"])]:
            # perhaps the token of a rank of long ago, which the answer does not reach
            store.set(f"lockstep/attempt/{store.get(f'lockstep/here/{other}').decode()}", attempt)
        missing = {r for r in missing if not store.check([f"{attempt}/joined/{r}"])}
        if missing and time.monotonic() > until:
            raise UserError(
                f"rank(s) {', '.join(map(str, sorted(missing)))} of {size} did not come in {seconds:g} s",
                "Check that they were started, and their output; --collective-timeout gives them longer.",
            )
        time.sleep(_POLL_S if missing else 0)
    return PrefixStore(attempt, store)


def choose_interface(store: Store, master: str, rank: int, size: int, environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface on the way to rank 0, where it is not set; for ranks on several hosts.

    By itself gloo takes the address that the host's own name stands for. On many systems that is 127.0.1.1, where no
    other host finds it. On rank 0's host the master's address may be a loopback one too: it looks to another host.
    """
    own = "" if environ.get(INTERFACE) else address_towards(master)
    store.set(f"address/{rank}", own)
    if own and ip_address(own).is_loopback:
        found = [text.decode() for text in store.multi_get([f"address/{other}" for other in range(size)])]
        others = [text for text in found if text and not ip_address(text).is_loopback]
        own = address_towards(others[0]) if others else ""
    if name := interface_of(own):
        environ[INTERFACE] = name
