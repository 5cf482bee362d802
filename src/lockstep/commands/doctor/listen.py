"""Machine 0's part: answer the other machines' doctors for a while."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from lockstep.commands.doctor import network
from lockstep.commands.doctor.children import run
from lockstep.commands.doctor.collectives import Group, all_reduce, outcome
from lockstep.commands.doctor.finding import Finding, graded
from lockstep.commands.doctor.master import BULK, HELLO, SHARED_SIZES, Messages
from lockstep.commands.doctor.plan import Plan

_LOOK_S, _MOST_S = 0.1, 120.0


@dataclass
class _Server:
    """Answers each doctor in a thread of its own."""

    seconds: float  # for each message
    mine: dict[str, str]  # this machine's versions
    clock: Callable[[], int]  # nanoseconds since 1970
    hosts: set[str] = field(default_factory=set)  # that came to their end
    found: SimpleQueue[Finding] = field(default_factory=SimpleQueue)
    reducing: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, connection: socket.socket, address: str) -> None:
        """Answer one doctor's questions to their end."""
        connection.settimeout(self.seconds)
        asker = Messages(connection)
        try:
            with connection:
                try:
                    hello, about = asker.receive()
                except (ValueError, TypeError):
                    hello = ""
                if hello != HELLO:
                    return  # a port scanner, or a rank of a run that came too early
                host = f"{about['host']} ({address})"
                asker.send({"versions": self.mine})
                while (question := asker.receive()) != ["done"]:
                    match question:
                        case ["clock"]:
                            asker.send(self.clock())
                        case ["send"]:
                            connection.sendall(bytes(BULK))
                        case ["all-reduce", int() | float() as seconds]:
                            own, limit = connection.getsockname()[0], min(seconds, _MOST_S)
                            connection.settimeout(self.seconds + limit)  # this rank may be refused, theirs kept waiting
                            self._all_reduce(asker, host, own, limit)
                        case _:
                            raise ValueError(f"an unknown question {question!r}")
        except (OSError, ValueError, LookupError, TypeError) as error:
            message = f"{address} left in the middle: {error}"
            self.found.put(Finding("asked", "warn", message, "See what doctor printed there."))
            return
        self.found.put(Finding("asked", "ok", f"{host} asked, and has the findings"))
        self.hosts.add(host)

    def _all_reduce(self, asker: Messages, host: str, own: str, seconds: float) -> None:
        """Rank 0 of two, whose other one is at the other end."""
        if not self.reducing.acquire(timeout=seconds / 2):  # the answer must come before the other one's deadline
            asker.send(None)
            return
        try:
            with socket.create_server(("", 0)) as store:
                port = store.getsockname()[1]
                group = Group("gloo", 2, seconds, port, own, SHARED_SIZES)
                ranks = run([(all_reduce, group, 0, "cpu", store)], seconds, started=lambda _: asker.send(port))
        finally:
            self.reducing.release()
        remedy = "The other machine's doctor says what to do."
        self.found.put(outcome("gloo", f"with {host}", group, ranks, remedy))


def listen(plan: Plan, mine: dict[str, str], clock: Callable[[], int] = time.time_ns) -> Iterator[Finding]:
    """Answer until all other machines of the plan have asked, or the time is over.

    Args:
        plan: with one node the time decides alone.
        mine: this machine's versions.
        clock: nanoseconds since 1970.
    """
    try:
        listener = socket.create_server(("", plan.master_port))
    except OSError:
        yield network.port(plan.master_port, plan.timeout)
        return
    server, until, over = _Server(plan.timeout, mine, clock), time.monotonic() + plan.listen, False
    with listener:
        listener.settimeout(_LOOK_S)
        while not over:
            over = time.monotonic() >= until or 0 < plan.nnodes - 1 <= len(server.hosts)
            with suppress(TimeoutError):
                connection, (address, *_) = listener.accept()
                threading.Thread(target=server.serve, args=(connection, address), daemon=True).start()
            while not server.found.empty():  # once more after the last host
                yield server.found.get()
    hosts, wanted = sorted(server.hosts), max(1, plan.nnodes - 1)
    few = len(hosts) < wanted
    message = f"{len(hosts)} other machine(s) asked: {', '.join(hosts)}"
    if few:
        message = f"{len(hosts)} of {wanted} other machine(s) asked in {plan.listen:g} s"
    line = f"`lockstep doctor --master-addr THIS-HOST --master-port {plan.master_port}`"
    remedy = f"On each of them: {line}; else a firewall is between."
    yield graded("listened", message, {"hosts": hosts}, (few, "fail", remedy))
