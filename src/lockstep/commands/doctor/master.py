"""The way from this host to machine 0: its name, its port, its clock, the link, and an all-reduce between the two."""

import errno
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.commands.doctor import children, collectives
from lockstep.commands.doctor.finding import Finding, fail, ok, skipped, warn, within
from lockstep.commands.doctor.network import Resolver, is_loopback, resolve
from lockstep.processes.network import Interface

HELLO = "lockstep-doctor"
LINE = 2048  # bytes of a line at most
BULK = 4 << 20  # bytes sent to measure the link
_CLOCK_ASKED, _CLOCK_OFF_S = 10, 1.0
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES)  # the last two: a route that drops
_ASK_S = 2.0  # for a first word of what may be something else than a doctor
SHARED_SIZES = (64 << 10, 1 << 20)


@dataclass
class Line:
    """A connection that talks in lines."""

    socket: socket.socket

    def __post_init__(self) -> None:
        self.file = self.socket.makefile("rwb")

    def ask(self, text: str) -> str:
        """Send a line, and return the next one.

        Raises:
            OSError: where the other end is silent (TimeoutError) or gone.
        """
        self.send(text)
        answer = self.file.readline(LINE)
        if not answer.endswith(b"\n"):
            raise ConnectionResetError(errno.ECONNRESET, "the other end hung up")
        return answer.decode(errors="replace").strip()

    def send(self, text: str) -> None:
        """Send a line."""
        self.file.write(text.encode() + b"\n")
        self.file.flush()


def reach(
    host: str, port: int, seconds: float, found: list[Interface], resolver: Resolver = resolve
) -> tuple[Finding, socket.socket | None]:
    """Resolve machine 0's name and connect to it; the open connection where that went well."""
    check, where = "master", f"{host}:{port}"
    try:
        addresses = within(seconds, resolver, host)
    except TimeoutError:
        message = f"{host}: the name server did not answer in {seconds:g} s"
        return fail(check, message, "Check /etc/resolv.conf, or give the address in numbers."), None
    except OSError as error:
        message = f"{host} has no address ({error.strerror})"
        return fail(check, message, "Check the spelling, give the address in numbers, or add it to /etc/hosts."), None
    shown = where if addresses == [host] else f"{where} ({', '.join(addresses)})"
    began = time.perf_counter()
    try:
        connection = socket.create_connection((host, port), seconds)
    except OSError as error:
        return refused(shown, port, error, seconds), None
    took = time.perf_counter() - began
    own = connection.getsockname()[0]
    name = next((each.name for each in found if own in each.addresses), "?")
    if all(map(is_loopback, addresses)) and host not in addresses:
        message = f"{shown}: the name leads to the loopback, so each machine would look for machine 0 at itself"
        remedy = "Fine on one machine; with several give machine 0's address in numbers, or correct /etc/hosts."
        return warn(check, message, remedy), connection
    message = f"{shown}: connected in {took * 1e3:.1f} ms, from {own} by {name}"
    return ok(check, message, connect_ms=round(took * 1e3, 3), source=own, interface=name), connection


def refused(shown: str, port: int, error: OSError, seconds: float) -> Finding:
    """What a connection that did not come about means."""
    start = f"Start `lockstep doctor --listen 300 --master-port {port}` there, or machine 0 of the run"
    if isinstance(error, TimeoutError):
        message = f"{shown}: no answer in {seconds:g} s: packets are dropped on the way, or nobody has this address"
        return fail(
            "master", message, "Check the address, then open the port in both hosts' and the cloud's firewalls."
        )
    if error.errno == errno.ECONNREFUSED:
        message = f"{shown}: the host answers, and nothing listens at this port (refused)"
        return fail("master", message, f"{start}; a firewall that rejects looks the same.")
    if error.errno in _NO_WAY:
        message = f"{shown}: no way there ({error.strerror})"
        remedy = "`ip route get ADDRESS` says which way is taken: check the address, the interface and its network."
        return fail("master", message, remedy)
    return fail("master", f"{shown}: {error.strerror or error}", "Check address and port.")


def offset(ask: Callable[[], int], clock: Callable[[], int] = time.time_ns) -> tuple[float, float]:
    """(seconds that the other clock is ahead, how far off that may be), from the quickest of some answers.

    The other clock is read at some moment between asking and hearing: half the round trip is the error (Cristian,
    "Probabilistic clock synchronization", 1989).
    """
    found = []
    for _ in range(_CLOCK_ASKED):
        before = clock()
        other = ask()
        after = clock()
        found.append(((after - before) / 2e9, (other - (before + after) / 2) / 1e9))
    error, ahead = min(found)
    return ahead, error


def talk(
    connection: socket.socket, host: str, interface: str, seconds: float, mine: dict[str, str]
) -> Iterator[Finding]:
    """What the doctor on machine 0 says: versions, clock, link, and an all-reduce.

    Args:
        connection: to machine 0.
        host: its name.
        interface: this host's, through which it is reached.
        seconds: for each answer, and for the all-reduce.
        mine: this host's versions.
    """
    line = Line(connection)
    connection.settimeout(min(seconds, _ASK_S))
    try:
        answer = line.ask(f"{HELLO} {json.dumps({'host': socket.gethostname(), 'versions': mine})}")
        theirs = json.loads(answer)["versions"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"no answer in {min(seconds, _ASK_S):g} s" if isinstance(error, TimeoutError) else "another answer"
        remedy = "Clock, link and versions are compared where `lockstep doctor --listen 300` listens at the port."
        yield warn("master's doctor", f"what listens at {host} is no doctor ({what}); perhaps the run itself", remedy)
        return
    connection.settimeout(seconds)
    try:
        yield versions(mine, theirs)
        yield clock(*offset(lambda: int(line.ask("clock"))))
        yield link(line, seconds)
        yield from together(line, host, interface, seconds)
        line.send("bye")
    except (OSError, ValueError) as error:
        yield fail("master's doctor", f"stopped answering: {error}", "See what it printed on machine 0.")


def versions(mine: dict[str, str], theirs: dict[str, str]) -> Finding:
    """The same software on both machines?"""
    other = [
        f"{name} {mine[name]} here, {theirs.get(name, '?')} there" for name in mine if mine[name] != theirs.get(name)
    ]
    if other:
        return warn(
            "versions", "; ".join(other), "Install the same on every machine: bits and NCCL's wire format differ."
        )
    return ok("versions", ", ".join(f"{name} {number}" for name, number in mine.items()) + " on both")


def clock(ahead: float, error: float) -> Finding:
    """This host's clock against machine 0's, in seconds."""
    numbers = {"ahead_s": round(ahead, 6), "error_s": round(error, 6)}
    message = f"machine 0's is {abs(ahead) * 1e3:.1f} ms {'ahead' if ahead > 0 else 'behind'}, +-{error * 1e3:.1f} ms"
    if abs(ahead) - error > _CLOCK_OFF_S:
        remedy = "`timedatectl set-ntp true` (or chrony) on both: the records' times could not be compared."
        return warn("clock", message, remedy, **numbers)
    return ok("clock", message, **numbers)


def link(line: Line, seconds: float) -> Finding:
    """Round trip of a line, and the rate at which some MiB come."""
    trips = []
    for _ in range(_CLOCK_ASKED):
        began = time.perf_counter()
        line.ask("clock")
        trips.append(time.perf_counter() - began)
    line.send(f"send {BULK}")
    began, left = time.perf_counter(), BULK
    while left and time.perf_counter() - began < seconds:
        left -= len(line.file.read1(min(left, 1 << 16))) or _gone()
    rate = (BULK - left) / (time.perf_counter() - began)
    if left:
        message = f"{BULK - left} of {BULK} bytes came in {seconds:g} s"
        return fail("link", message, "Look for a lossy cable or a wrong MTU: `ping -M do -s 1472 MASTER`.")
    trip = statistics.median(trips)
    message = f"round trip {trip * 1e3:.2f} ms, {rate * 8 / 1e6:,.0f} Mbit/s from there to here"
    return ok("link", message, round_trip_ms=round(trip * 1e3, 3), mbit_per_s=round(rate * 8 / 1e6, 1))


def _gone() -> int:
    raise ConnectionResetError(errno.ECONNRESET, "the other end hung up")


def together(line: Line, host: str, interface: str, seconds: float) -> Iterator[Finding]:
    """An all-reduce over gloo between machine 0 and this one, as a run would do it."""
    told: dict[str, Any] = json.loads(line.ask(f"reduce {seconds}"))
    if "busy" in told:
        yield skipped("gloo to master", "machine 0 is busy with another host's")
        return
    seat = collectives.Seat(1, 2, "gloo", "cpu", seconds, host=host, port=told["port"], sizes=SHARED_SIZES, across=True)
    heard = children.run([(collectives.reduce, (seat,))], seconds)
    remedy = (
        f"Open all ports between them (the store's was {told['port']}); if GLOO_SOCKET_IFNAME is set, then to the "
        f"interface between them (here {interface})."
    )
    yield collectives.judged("gloo to master", "this host and machine 0", 2, heard, seconds, remedy, first=1)
