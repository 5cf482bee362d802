"""Machine 0's part: answer the other machines' doctors for a while."""

import json
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.commands.doctor import children, collectives
from lockstep.commands.doctor.finding import Finding, fail, ok, warn
from lockstep.commands.doctor.master import BULK, HELLO, LINE, SHARED_SIZES
from lockstep.commands.doctor.network import port as port_finding

_LOOK_S, _MOST_S = 0.1, 120.0


class _Server(socketserver.ThreadingTCPServer):
    """Takes one doctor a connection; what they were is in `asked`."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, port: int, seconds: float, mine: dict[str, str], log: Callable[[Finding], None], clock: Callable[[], int]
    ) -> None:
        super().__init__(("", port), _Talk)
        self.seconds, self.mine, self.log, self.clock = seconds, mine, log, clock
        self.asked: list[str] = []  # hosts that came to their end
        self.reducing = threading.Lock()


class _Talk(socketserver.StreamRequestHandler):
    """One doctor's questions."""

    server: _Server

    def handle(self) -> None:
        self.connection.settimeout(self.server.seconds)
        who = str(self.client_address[0])
        try:
            word, _, told = self._line().partition(" ")
            if word != HELLO:
                return  # a port scanner, or a rank of a run that came too early
            host = f"{json.loads(told)['host']} ({who})"
            self._log(json.dumps({"host": socket.gethostname(), "versions": self.server.mine}))
            while (line := self._line()) != "bye":
                self._answer(line, host)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.server.log(warn("asked", f"{who} left in the middle: {error}", "See what doctor printed there."))
            return
        self.server.asked.append(host)
        self.server.log(ok("asked", f"{host} asked, and has the findings"))

    def _line(self) -> str:
        line = self.rfile.readline(LINE)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("hung up")
        return line.decode(errors="replace").strip()

    def _log(self, text: str) -> None:
        self.wfile.write(text.encode() + b"\n")

    def _answer(self, line: str, host: str) -> None:
        word, _, value = line.partition(" ")
        if word == "clock":
            self._log(str(self.server.clock()))
        elif word == "send":
            self.wfile.write(bytes(min(int(value), BULK)))
        elif word == "reduce":
            self._reduce(host, min(float(value), _MOST_S))
        else:
            raise ValueError(f"an unknown question {word!r}")

    def _reduce(self, host: str, seconds: float) -> None:
        """Rank 0 of two, whose other one is at the other end."""
        if not self.server.reducing.acquire(timeout=seconds):
            self._log(json.dumps({"busy": True}))
            return
        try:
            with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
                file = str(Path(folder, "port"))
                seat = collectives.Seat(0, 2, "gloo", "cpu", seconds, found_in=file, sizes=SHARED_SIZES, across=True)

                def invite(_: list[int]) -> None:
                    self._log(json.dumps({"port": collectives.told_port(file, seconds)}))

                heard = children.run([(collectives.reduce, (seat,))], seconds, started=invite)
        finally:
            self.server.reducing.release()
        remedy = "The other machine's doctor says what to do."
        self.server.log(collectives.judged("gloo", f"with {host}", 2, heard, seconds, remedy))


def listen(
    port: int,
    nnodes: int,
    seconds: float,
    timeout: float,
    mine: dict[str, str],
    log: Callable[[Finding], None],
    clock: Callable[[], int] = time.time_ns,
) -> None:
    """Answer at a port until all other machines have asked, or the time is over; with one node: until the time is over.

    Args:
        port: to listen at.
        nnodes: machines of the run, this one included.
        seconds: in all.
        timeout: for each answer of another machine.
        mine: this machine's versions.
        say: is given each finding.
        clock: nanoseconds since 1970.
    """
    try:
        server = _Server(port, timeout, mine, log, clock)
    except OSError:
        log(port_finding(port, timeout))
        return
    with server:
        threading.Thread(target=server.serve_forever, args=(_LOOK_S,), daemon=True).start()
        until = time.monotonic() + seconds
        while time.monotonic() < until and (nnodes == 1 or len(set(server.asked)) < nnodes - 1):
            time.sleep(_LOOK_S)
        server.shutdown()
    hosts = sorted(set(server.asked))
    log(_summary(hosts, nnodes, seconds, port))


def _summary(hosts: list[str], nnodes: int, seconds: float, port: int) -> Finding:
    numbers: dict[str, Any] = {"hosts": hosts}
    if len(hosts) >= max(1, nnodes - 1):
        return ok("listened", f"{len(hosts)} other machine(s) asked: {', '.join(hosts)}", **numbers)
    wanted = f"{len(hosts)} of {nnodes - 1} other machine(s)" if nnodes > 1 else "no other machine"
    remedy = (
        f"On each of them: `lockstep doctor --master-addr THIS-HOST --master-port {port}`; else a firewall is between."
    )
    return fail("listened", f"{wanted} asked in {seconds:g} s", remedy, **numbers)
