"""How the processes of a run find each other: addresses, the store of its ranks, the launchers of several machines.

On one machine all listen at the loopback alone. What they read from each other is numbers and JSON: torch's elastic
rendezvous would unpickle what anybody put there.
"""

import errno
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from lockstep.config import Execution
from lockstep.distributed.environment import JOB
from lockstep.distributed.signals import StopSignals, exit_by
from lockstep.errors import UserError, refusal

LOOPBACK = "127.0.0.1"
STORE = "LOCKSTEP_STORE"  # where our launcher's store listens, for the line at a run's start
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_POLL_S = 0.05
_MOST = 5  # differences that a message names
_GOODBYE_S = 10.0  # that machine 0 waits until the others have read why it ends
_PART_S = 30.0  # that machine 0 keeps the store for others, at the end
_has_met = False  # this process has gone to meet the other machines, or has said that it won't
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # torch's word for: the launcher has opened the store, rank 0 need not


def interfaces() -> dict[str, list[str]]:
    """The IP addresses of each of this host's interfaces that is up; all are, where /proc or /sys is not mounted."""
    try:  # isup would want a cable as well
        up = {name for name, each in psutil.net_if_stats().items() if "up" in each.flags.split(",")}
    except OSError:
        up = {*psutil.net_if_addrs()}
    ip = (socket.AF_INET, socket.AF_INET6)
    found = psutil.net_if_addrs().items()
    return {name: [each.address for each in own if each.family in ip] for name, own in found if name in up}


def address_towards(host: str) -> str:
    """This host's address on the way to another one; empty where its name is unknown or no route leads there."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The name of the network interface that has this address; empty where none has it."""
    return next((name for name, addresses in interfaces().items() if address in addresses), "")


def keep_to_loopback(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have gloo and NCCL listen on the loopback alone, for ranks of one machine; an interface that is named stays."""
    if name := interface_of(LOOPBACK):
        for variable in INTERFACES:
            environ.setdefault(variable, name)


def listen_at(host: str, port: int) -> socket.socket:
    """A socket that listens at this host's address `host`, or on all interfaces where others find another one by it.

    That is a name which stands for a loopback address here (Debian's 127.0.1.1), or for an address that this machine
    hasn't itself (a Kubernetes service, a router). Port 0: a free one. Raises OSError where the port is taken.
    """
    with suppress(socket.gaierror):
        for family, _, _, _, there in sorted(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)):  # IPv4 first
            address = str(there[0])
            if ip_address(address.partition("%")[0]).is_loopback and host not in ("localhost", address):
                break
            try:
                return socket.create_server((address, port), family=family)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve(listener: socket.socket, size: int, limit: timedelta) -> TCPStore:
    """A store that answers at a listening socket, and nowhere else; torch's own would listen on all interfaces."""
    address, port = listener.getsockname()[:2]
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(address, address)
    return TCPStore(host, port, size, True, limit, wait_for_workers=False, master_listen_fd=listener.detach())


def shown(listener: socket.socket) -> str:
    """Where a socket listens, for people: `127.0.0.1:29500`, `all interfaces:29500`."""
    address, port = listener.getsockname()[:2]
    where = "all interfaces" if address in ("0.0.0.0", "::") else address
    return f"[{where}]:{port}" if ":" in where else f"{where}:{port}"


def listening(size: int, local_size: int, environ: Mapping[str, str]) -> str:
    """What of a run others than this machine may reach, in a line; empty where that is nothing."""
    store = environ.get(STORE) or f"{environ.get('MASTER_ADDR', LOOPBACK)}:{environ.get('MASTER_PORT', '?')}"
    if size == 1 or (size == local_size and store.startswith(LOOPBACK)):
        return ""
    names = ", ".join(sorted({environ.get(variable, "an interface of its choice") for variable in INTERFACES}))
    return f"listening: store at {store}; ranks on {names}; see SECURITY.md for who may reach them"


def open_store(environ: Mapping[str, str], rank: int, size: int, local_size: int, seconds: float) -> Store:
    """The store of the ranks of this attempt: their launcher's, else one that rank 0 opens."""
    limit, port = timedelta(seconds=seconds), int(environ["MASTER_PORT"])
    if port > 65535:
        raise ValueError("there is no such port")
    host = LOOPBACK if JOB in environ and local_size == size else environ["MASTER_ADDR"]
    if rank == 0 and environ.get(_AGENT) != "True":
        store = serve(listen_at(host, port), size, limit)
    else:
        store = TCPStore(host, port, size, False, limit, wait_for_workers=False)
    return fresh_store(PrefixStore(environ.get(JOB, "lockstep"), store), rank, size, seconds)


def fresh_store(store: Store, rank: int, size: int, seconds: float) -> Store:
    """A part of the store that holds nothing of ranks before these.

    An elastic launcher keeps one store over all its restarts. What is left in it, addresses or an alarm, would be taken
    for current. Its count of restarts names no attempt: a host that joins later counts from 0. Raises UserError where
    not all ranks came in time.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"here/{rank}", token)
        attempt = store.get(f"attempt/{token}").decode()
        store.set(f"{attempt}/joined/{rank}", "")
        return PrefixStore(attempt, store)
    attempt, until, missing = uuid.uuid4().hex, time.monotonic() + seconds, [*range(1, size)]
    while missing:
        for other in missing:
            if store.check([f"here/{other}"]):  # perhaps by a rank of long ago, which the answer does not reach
                store.set(f"attempt/{store.get(f'here/{other}').decode()}", attempt)
        missing = [other for other in missing if not store.check([f"{attempt}/joined/{other}"])]
        if missing and time.monotonic() > until:
            raise UserError(
                f"rank(s) {', '.join(map(str, missing))} of {size} did not come in {seconds:g} s",
                "Check that they were started, and their output; --collective-timeout gives them longer.",
            )
        time.sleep(_POLL_S / 2 if missing else 0)
    return PrefixStore(attempt, store)


def choose_interface(store: Store, master: str, rank: int, size: int, environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface towards rank 0, where it is not set; for ranks on several hosts.

    By itself gloo takes the address that the host's own name stands for. On many systems that is 127.0.1.1, where no
    other host finds it. On rank 0's host the master's address may be a loopback one too: it looks to another host.
    """
    own = "" if environ.get(INTERFACES[0]) else address_towards(master)
    store.set(f"address/{rank}", own)
    if own and ip_address(own).is_loopback:
        found = [text.decode() for text in store.multi_get([f"address/{other}" for other in range(size)])]
        others = [text for text in found if text and not ip_address(text).is_loopback]
        own = address_towards(others[0]) if others else ""
    if name := interface_of(own):
        environ[INTERFACES[0]] = name


@cache
def versions() -> dict[str, str]:
    """Of what computes: Lockstep, its source, torch and torchvision."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    installed = {name: version(package) for name, package in [("lockstep", "lockstep-torch"), ("torch", "torch")]}
    return installed | {"torchvision": version("torchvision"), "lockstep's source": digest.hexdigest()[:12]}


def different(stated: Sequence[Mapping[str, str]], places: Sequence[str]) -> UserError | None:
    """The error for values that are not the same everywhere; None where they are.

    Args:
        stated: names and values, of each process.
        places: what to call each, as "machine 1 (node7)".
    """
    found = []
    for name in dict.fromkeys(name for each in stated for name in each):
        values = [each.get(name, "not set") for each in stated]
        other = next((place for place, value in enumerate(values) if value != values[0]), 0)
        if other:
            found.append(f"{name} is {values[0]} on {places[0]} and {values[other]} on {places[other]}")
    if not found:
        return None
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return UserError(
        f"the processes were started for different runs: {'; '.join([*found[:_MOST], *more])}",
        "Give every machine the same command, the same versions and the same data.",
    )


def meet(
    execution: Execution, count: int, stops: StopSignals | None = None, refused: str = ""
) -> tuple[Store, list[dict[str, str]]]:
    """Meet the launchers of the other machines, of which each starts `count` workers of its own.

    Returns the store, and torchrun's variables for each of this machine's workers. `refused`: why it starts none.
    Raises UserError where --master-port is taken, the others did not come in time, or one of them refuses.
    """
    global _has_met
    nodes, node, seconds, _has_met = execution.nnodes, execution.node_rank, execution.collective_timeout, True
    host, port, where = execution.master_addr if nodes > 1 else LOOPBACK, execution.master_port, ""
    limit, until = timedelta(seconds=seconds), time.monotonic() + seconds
    try:
        if node > 0:
            store = TCPStore(host, port, nodes, False, limit)
        else:
            listener = listen_at(host, port)
            where, store = shown(listener), serve(listener, nodes, limit)
        store.set(f"machine/{node}", json.dumps({"count": count, "refused": refused, "--nnodes": str(nodes)}))
        while True:
            came = [other for other in range(nodes) if store.check([f"machine/{other}"])]
            stated = [json.loads(store.get(f"machine/{other}")) for other in came]
            if error := _objection(came, stated):
                store.set(f"heard/{node}", "")
                if node == 0:
                    _await(store, [f"heard/{other}" for other in (range(nodes) if refused else came)], _GOODBYE_S)
                raise error
            if len(came) == nodes:
                break
            if stops and (asked := stops.take()):
                raise exit_by(asked[0])
            if time.monotonic() > until:
                raise DistError(f"machine(s) {', '.join(map(str, {*range(nodes)} - {*came}))} did not come")
            time.sleep(_POLL_S)
    except OSError as error:
        taken = "is in use" if error.errno == errno.EADDRINUSE else f"can't be opened ({refusal(error)})"
        raise UserError(f"--master-port {port} {taken} on this machine", "Name another one.") from error
    except (DistError, RuntimeError) as error:
        raise UserError(
            f"machine {node} of {nodes} did not meet the others at {host}:{port} in {seconds:g} s: {error}",
            "Check that the address is machine 0's, the port is open, and the command runs on every machine.",
        ) from error
    counts = [each["count"] for each in stated]
    common = {"WORLD_SIZE": str(sum(counts)), "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(node), _AGENT: "True"}
    common |= {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), STORE: where}
    first = sum(counts[:node])
    return store, [common | {"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(count)]


def _objection(came: Sequence[int], stated: Sequence[Mapping[str, Any]]) -> UserError | None:
    """Why no machine goes on: one refuses, or has another number of machines."""
    if refused := next((each["refused"] for each in stated if each["refused"]), ""):
        return UserError(f"{refused}; no machine starts", "Put that right there, and start all of them again.")
    return different([{"--nnodes": each["--nnodes"]} for each in stated], [f"machine {other}" for other in came])


def _await(store: Store, keys: Sequence[str], seconds: float) -> None:
    """Wait until the store has all these keys, but not for longer."""
    until = time.monotonic() + seconds
    while not store.check(list(keys)) and time.monotonic() < until:
        time.sleep(_POLL_S)


def part(execution: Execution, store: Store) -> None:
    """Where all went well: machine 0 keeps its store until the workers of the others have ended too."""
    if execution.nnodes > 1:
        with suppress(DistError, RuntimeError):  # machine 0 has waited long enough
            store.set(f"parted/{execution.node_rank}", "")
            if execution.node_rank == 0:
                _await(store, [f"parted/{node}" for node in range(execution.nnodes)], _PART_S)


@contextmanager
def refusing_for_all(execution: Execution) -> Iterator[None]:
    """Where this machine refuses its part of a run inside, before it has met the others, they learn why."""
    try:
        yield
    except UserError as error:
        if execution.nnodes > 1 and not _has_met:
            why = f"machine {execution.node_rank} ({socket.gethostname()}): {error.message}"
            with suppress(UserError):  # this one, again; or nobody is there
                meet(replace(execution, collective_timeout=_GOODBYE_S), 0, refused=why)
        raise
