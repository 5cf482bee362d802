"""The way from this host to machine 0: its name, its port, its clock, the link, and an all-reduce between the two."""

import errno
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.commands.doctor.children import run
from lockstep.commands.doctor.collectives import Group, all_reduce, outcome
from lockstep.commands.doctor.finding import Finding, graded
from lockstep.commands.doctor.network import is_loopback, lookup
from lockstep.processes.network import interface_of

HELLO = "lockstep-doctor"
BULK = 4 << 20  # bytes sent to measure the link
SHARED_SIZES = (64 << 10, 1 << 20)  # bytes
_LONGEST = 512  # bytes of a message: no stranger gets far in nesting one
_TRIPS, _CLOCK_OFF_S = 10, 1.0
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES)  # the last two: a route that drops
_ASK_S = 2.0  # for the first answer of what may be something else than a doctor


class Messages:
    """A connection between two doctors, a JSON value a line.

    Its methods raise OSError where the other end is silent (TimeoutError) or gone, ValueError for what is no JSON.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.file = connection.makefile("rwb")

    def send(self, message: Any) -> None:
        """Send a message."""
        self.file.write(json.dumps(message).encode() + b"\n")
        self.file.flush()

    def receive(self) -> Any:
        """Wait for the next message."""
        line = self.file.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise ConnectionResetError(errno.ECONNRESET, "the other end hung up")
        return json.loads(line)

    def ask(self, *question: Any) -> Any:
        """Send a question, and wait for the answer."""
        self.send(question)
        return self.receive()


def visit(host: str, port: int, seconds: float, mine: dict[str, str]) -> Iterator[Finding]:
    """Resolve machine 0's name, connect to it, and compare with the doctor there. `mine`: this host's versions."""
    check = "master"
    addresses, why = lookup(host, seconds)
    if not addresses:
        remedy = "Check the spelling and /etc/resolv.conf, give the address in numbers, or add it to /etc/hosts."
        yield Finding(check, "fail", why, remedy)
        return
    shown = f"{host}:{port}" if addresses == [host] else f"{host}:{port} ({', '.join(addresses)})"
    began = time.perf_counter()
    try:
        connection = socket.create_connection((host, port), seconds)
    except OSError as error:
        yield refused(shown, port, error, seconds)
        return
    took = time.perf_counter() - began
    with connection:
        own = connection.getsockname()[0]
        interface = interface_of(own) or "?"
        lost = all(map(is_loopback, addresses)) and host not in addresses
        message = f"{shown}: connected in {took * 1e3:.1f} ms, from {own} by {interface}"
        if lost:
            message = f"{shown}: the name leads to the loopback, so each machine would look for machine 0 at itself"
        numbers = {"connect_ms": round(took * 1e3, 3), "source": own, "interface": interface}
        remedy = "Fine on one machine; with several give machine 0's address in numbers, or correct /etc/hosts."
        yield graded(check, message, numbers, (lost, "warn", remedy))
        yield from compare(connection, host, interface, seconds, mine)


def refused(shown: str, port: int, error: OSError, seconds: float) -> Finding:
    """What a connection that did not come about means."""
    message, remedy = error.strerror or str(error), "Check address and port."
    if isinstance(error, TimeoutError):
        message = f"no answer in {seconds:g} s: packets are dropped on the way, or nobody has this address"
        remedy = "Check the address, then open the port in both hosts' and the cloud's firewalls."
    elif error.errno == errno.ECONNREFUSED:
        message = "the host answers, and nothing listens at this port (refused)"
        start = f"Start `lockstep doctor --listen 300 --master-port {port}` there, or machine 0 of the run"
        remedy = f"{start}; a firewall that rejects looks the same."
    elif error.errno in _NO_WAY:
        message = f"no way there ({message})"
        remedy = "`ip route get ADDRESS` says which way is taken: check the address, the interface and its network."
    return Finding("master", "fail", f"{shown}: {message}", remedy)


def compare(
    connection: socket.socket, host: str, interface: str, seconds: float, mine: dict[str, str]
) -> Iterator[Finding]:
    """Versions, clock, link, and an all-reduce with the doctor on machine 0; `seconds` for each answer."""
    master, check = Messages(connection), "master's doctor"
    connection.settimeout(min(seconds, _ASK_S))
    try:
        theirs = dict(master.ask(HELLO, {"host": socket.gethostname()})["versions"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no answer in {min(seconds, _ASK_S):g} s" if isinstance(error, TimeoutError) else "another answer"
        message = f"what listens at {host} is no doctor ({what}); perhaps the run itself"
        remedy = "Clock, link and versions are compared where `lockstep doctor --listen 300` listens at the port."
        yield Finding(check, "warn", message, remedy)
        return
    connection.settimeout(seconds)
    try:
        yield versions(mine, theirs)
        trips = clock_trips(lambda: int(master.ask("clock")))
        yield clock(trips)
        yield link(master, statistics.median(2 * half for half, _ in trips), seconds)
        yield together(master, connection.getpeername()[0], interface, seconds)
        master.send(["done"])
    except (OSError, ValueError, TypeError) as error:
        yield Finding(check, "fail", f"stopped answering: {error}", "See what it printed on machine 0.")


def versions(mine: dict[str, str], theirs: dict[str, str]) -> Finding:
    """The same software on both machines?"""
    pairs = [(name, number, theirs.get(name, "?")) for name, number in mine.items()]
    other = "; ".join(f"{name} {here} here, {there} there" for name, here, there in pairs if here != there)
    same = ", ".join(f"{name} {here}" for name, here, _ in pairs) + " on both"
    remedy = "Install the same on every machine: bits and NCCL's wire format differ."
    return graded("versions", other or same, {}, (bool(other), "warn", remedy))


def clock_trips(ask: Callable[[], int], clock: Callable[[], int] = time.time_ns) -> list[tuple[float, float]]:
    """For some answers: seconds of half a round trip, and that the other clock is ahead, which may be off by so much.

    The other clock is read at some moment between asking and hearing: half the round trip is the error (Cristian,
    "Probabilistic clock synchronization", 1989).
    """
    found = []
    for _ in range(_TRIPS):
        before, other, after = clock(), ask(), clock()
        found.append(((after - before) / 2e9, (other - (before + after) / 2) / 1e9))
    return found


def clock(trips: list[tuple[float, float]]) -> Finding:
    """This host's clock against machine 0's, by the quickest answer."""
    error, ahead = min(trips)
    way = "ahead" if ahead > 0 else "behind"
    message = f"machine 0's is {abs(ahead) * 1e3:.1f} ms {way}, +-{error * 1e3:.1f} ms"
    numbers = {"ahead_s": round(ahead, 6), "error_s": round(error, 6)}
    remedy = "`timedatectl set-ntp true` (or chrony) on both: the records' times could not be compared."
    return graded("clock", message, numbers, (abs(ahead) - error > _CLOCK_OFF_S, "warn", remedy))


def link(master: Messages, trip: float, seconds: float) -> Finding:
    """The rate at which some MiB come. `trip`: seconds of a message there and its answer."""
    master.send(["send"])
    began, left = time.perf_counter(), BULK
    while left and time.perf_counter() - began < seconds and (arrived := master.file.read1(min(left, 1 << 16))):
        left -= len(arrived)
    rate = BULK / (time.perf_counter() - began) * 8 / 1e6
    if left:
        message = f"{BULK - left} of {BULK} bytes came in {seconds:g} s"
        return Finding("link", "fail", message, "Look for a lossy cable or a wrong MTU: `ping -M do -s 1472 MASTER`.")
    numbers = {"round_trip_ms": round(trip * 1e3, 3), "mbit_per_s": round(rate, 1)}
    message = f"round trip {trip * 1e3:.2f} ms, {rate:,.0f} Mbit/s from there to here"
    return Finding("link", "ok", message, numbers=numbers)


def together(master: Messages, address: str, interface: str, seconds: float) -> Finding:
    """An all-reduce over gloo between machine 0 and this one, as a run would do it."""
    check, port = "gloo to master", master.ask("all-reduce", seconds)
    if port is None:
        return Finding(check, "skipped", "machine 0 is busy with another host's")
    group = Group("gloo", 2, seconds, port, address, SHARED_SIZES)
    ranks = run([(all_reduce, group, 1, "cpu")], seconds)
    remedy = (
        f"Open all ports between them (the store's was {port}); if GLOO_SOCKET_IFNAME is set, then to the "
        f"interface between them (here {interface})."
    )
    return outcome(check, "this host and machine 0", group, ranks, remedy, first=1)
