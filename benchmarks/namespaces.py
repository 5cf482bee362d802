"""Two hosts on this machine: network namespaces, and a link that can be cut, mended, limited and measured."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_ETC = Path("/etc/netns")  # `ip netns exec NAME` shows NAME's files below it as those of /etc


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    name: str  # of the namespace, of its device, and the host's own
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What to put before a command's words to run it here, on a host of this name."""
        named = 'hostname "$0" && exec "$@"'
        return ("ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, self.name)

    def run(self, *words: str) -> str:
        """A short command's output."""
        return subprocess.run([*self.prefix, *words], check=True, capture_output=True, text=True).stdout

    @property
    def sent_bytes(self) -> int:
        """On the link so far, with all headers; what the other host sent, this one received."""
        return int(self.run("cat", f"/sys/class/net/{self.name}/statistics/tx_bytes"))

    def limit(self, mbit: float | None) -> None:
        """Let it send no faster than that; None: as fast as it can."""
        if mbit is None:
            self._queue("pfifo_fast")
        else:  # the bucket has to hold what may go out between two ticks of the kernel's clock
            self._queue("tbf", "rate", f"{mbit}mbit", "burst", "128kb" if mbit > 500 else "8kb", "latency", "400ms")

    def _queue(self, *words: str) -> None:
        self.run("tc", "qdisc", "replace", "dev", self.name, "root", *words)


@dataclass(frozen=True)
class Link:
    """Two hosts and what is between them."""

    hosts: tuple[Host, Host]
    limit_mbit: float | None

    def cut(self) -> None:
        """From now on nothing arrives, and nobody is told: as where a switch fails."""
        for host in self.hosts:
            host._queue("blackhole")

    def unplug(self) -> None:
        """Take the second host's device down: as where a cable is pulled."""
        self.hosts[1].run("ip", "link", "set", self.hosts[1].name, "down")

    def mend(self) -> None:
        """The inverse of both."""
        for host in self.hosts:
            host.limit(self.limit_mbit)
        self.hosts[1].run("ip", "link", "set", self.hosts[1].name, "up")


def missing() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces want root"
    if absent := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"no {', '.join(absent)} here (Debian's iproute2 and util-linux have them)"
    tried = f"lockstep-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", tried], capture_output=True)
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


@contextmanager
def two_hosts(limit_mbit: float | None = None) -> Iterator[Link]:
    """Two hosts with a link between them, gone at the end with all that runs on them.

    Each knows the other's name, and its own as 127.0.1.1, as Debian writes it: programs that take the address of the
    host's name for one that others can reach fail here, as they do there.
    """
    mark = uuid.uuid4().hex[:6]  # a device's name has at most 15 characters
    link = Link((Host(f"ls{mark}a", "10.77.0.1"), Host(f"ls{mark}b", "10.77.0.2")), limit_mbit)
    try:
        for host, other in zip(link.hosts, reversed(link.hosts), strict=True):
            while not (_ETC / host.name).exists():
                with suppress(FileNotFoundError):  # the end of another pair of hosts takes an empty parent away
                    (_ETC / host.name).mkdir(parents=True)
            (_ETC / host.name / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n"
            )
            _ip("netns", "add", host.name)
        a, b = (host.name for host in link.hosts)
        _ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for host in link.hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.name)
            for device in ("lo", host.name):
                _ip("-n", host.name, "link", "set", device, "up")
            host.limit(limit_mbit)
        yield link
    finally:
        for host in link.hosts:
            _remove(host)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _remove(host: Host) -> None:
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout.split()
    for pid in pids:
        os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", host.name], capture_output=True)  # the link goes with it
    shutil.rmtree(_ETC / host.name, ignore_errors=True)
    with suppress(OSError):  # there are others
        _ETC.rmdir()
