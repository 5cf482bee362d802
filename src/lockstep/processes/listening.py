"""Where a run listens, and so who may reach it: on one machine the loopback alone, on several the address asked for."""

import errno
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address

from torch.distributed import TCPStore

from lockstep.processes.network import interface_of

LOOPBACK = "127.0.0.1"
STORE = "LOCKSTEP_STORE"  # where our launcher's store listens, for the line at a run's start
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_EVERYWHERE = "all interfaces"


def keep_to_loopback(environ: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on the loopback alone, for ranks of one machine; an interface that is named stays."""
    if name := interface_of(LOOPBACK):
        for variable in INTERFACES:
            environ.setdefault(variable, name)


@contextmanager
def loopback_alone() -> Iterator[None]:
    """`keep_to_loopback` for what this process does inside."""
    before = {variable: os.environ.get(variable) for variable in INTERFACES}
    keep_to_loopback(os.environ)
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens at this host's address `host`, or on all interfaces where that can't be told from its name.

    That is a name which stands for a loopback address here (Debian's 127.0.1.1) and for another one elsewhere, or for
    an address that this machine hasn't itself (a Kubernetes service, a router). Port 0: a free one.

    Raises:
        OSError: where the port is taken or not ours to take.
    """
    for family, address in _addresses(host):
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Where to listen so that who looks for `host` finds us; empty where that is anybody's guess."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    pairs = list(dict.fromkeys((family, str(there[0])) for family, _, _, _, there in found))
    looped = any(ip_address(address.partition("%")[0]).is_loopback for _, address in pairs)
    if looped and host != "localhost" and host not in [address for _, address in pairs]:
        return []  # others find another address behind the name
    return sorted(pairs, key=lambda pair: pair[0] != socket.AF_INET)


def shown(listener: socket.socket) -> str:
    """Where a socket listens, for people: `127.0.0.1:29500`, `all interfaces:29500`."""
    address, port = listener.getsockname()[:2]
    where = _EVERYWHERE if address in ("0.0.0.0", "::") else address
    return f"[{where}]:{port}" if ":" in where else f"{where}:{port}"


def serve_store(listener: socket.socket, size: int, wait: bool, limit: timedelta) -> TCPStore:
    """A store that answers at a listening socket, and nowhere else; torch's own would listen on all interfaces.

    `wait`: until `size` processes, this one among them, have opened it.
    """
    address, port = listener.getsockname()[:2]
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
    return TCPStore(host, port, size, True, limit, wait_for_workers=wait, master_listen_fd=listener.detach())


def described(size: int, local_size: int, backend: str, environ: Mapping[str, str]) -> str:
    """What listens where in a run of these processes, in a line; empty where nothing does."""
    if size == 1:
        return ""
    meeting = f"{environ.get('MASTER_ADDR', LOOPBACK)}:{environ.get('MASTER_PORT', '?')}"
    if own := environ.get(STORE):
        store = f"store at {own}"
    elif environ.get("LOCKSTEP_JOB"):
        store = f"store at {LOOPBACK if local_size == size else environ.get('MASTER_ADDR')}"
    else:
        store = f"the launcher's store at {meeting}, as that has opened it"
    chosen = [environ.get(variable, "an interface of its choice") for variable in INTERFACES]
    names = dict(zip(("gloo", "nccl"), chosen, strict=True))
    talk = ", ".join(f"{name} on {names[name]}" for name in names if name in ("gloo", backend))
    local = local_size == size and set(chosen) == {interface_of(LOOPBACK)}
    whom = "" if local and (not own or LOOPBACK in own) else "; see SECURITY.md for who may reach them"
    return f"listening: {store}; {talk}{whom}"
