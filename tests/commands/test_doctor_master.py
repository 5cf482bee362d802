"""The way to machine 0: refused, dropped, silent, strange, and a doctor at the other end."""

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lockstep.commands.doctor import master, network
from lockstep.commands.doctor.finding import Finding
from lockstep.commands.doctor.listen import listen
from lockstep.commands.doctor.plan import Plan

MINE = {"lockstep": "0.1.0", "torch": "2.12.0"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@contextmanager
def listener(answer: Callable[[socket.socket], None] = lambda _: None) -> Iterator[int]:
    """A port where somebody listens, takes one caller and does something with them."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()

        def take() -> None:
            caller, _ = own.accept()
            with caller:
                answer(caller)

        threading.Thread(target=take, daemon=True).start()
        yield own.getsockname()[1]


def reached(port: int, seconds: float = 5.0, host: str = "127.0.0.1") -> list[Finding]:
    return list(master.visit(host, port, seconds, MINE))


def test_nobody_listens() -> None:
    (found,) = reached(free_port())
    assert found.status == "fail"
    assert "nothing listens at this port (refused)" in found.message
    assert "lockstep doctor --listen 300" in found.remedy


def test_packets_that_are_dropped() -> None:
    """A queue of one caller that is full: the kernel drops what comes after, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        callers = [socket.socket() for _ in range(4)]
        for caller in callers:
            caller.setblocking(False)
            caller.connect_ex(("127.0.0.1", port))
        (found,) = reached(port, 0.3)
        for caller in callers:
            caller.close()
    assert found.status == "fail"
    assert "no answer in 0.3 s: packets are dropped on the way" in found.message
    assert "firewall" in found.remedy


@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL])
def test_no_way_there(number: int) -> None:
    found = master.refused("10.9.9.9:1", 1, OSError(number, "Network is unreachable"), 5)
    assert (found.status, found.message) == ("fail", "10.9.9.9:1: no way there (Network is unreachable)")
    assert "ip route get" in found.remedy
    assert master.refused("a:1", 1, OSError(errno.EIO, "what"), 5).message == "a:1: what"


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown_name(name: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def slow(name: str) -> list[str]:
        time.sleep(0.5)
        return []

    monkeypatch.setattr(network, "resolve", unknown_name)
    (found,) = master.visit("nosuch", 1, 5, MINE)
    assert (found.status, found.message) == ("fail", "nosuch has no address (Name or service not known)")
    assert "/etc/hosts" in found.remedy
    monkeypatch.setattr(network, "resolve", slow)
    (found,) = master.visit("nosuch", 1, 0.05, MINE)
    assert found.status == "fail"
    assert "the name server did not answer in 0.05 s" in found.message
    monkeypatch.setattr(network, "resolve", lambda _: ["127.0.0.1"])
    with listener() as port:
        found = next(master.visit("localhost", port, 5, MINE))
    assert found.status == "warn"
    assert "the name leads to the loopback" in found.message


def test_somebody_who_never_answers() -> None:
    silent = threading.Event()

    def never(_: socket.socket) -> None:
        silent.wait(60)

    with listener(never) as port:
        well, found = reached(port, 0.3)
        silent.set()
    assert well.status == "ok"
    assert found.status == "warn"
    assert "is no doctor (no answer in 0.3 s); perhaps the run itself" in found.message


def test_machine_0_reduces_with_one_host_at_a_time() -> None:
    with doctor() as (port, theirs):
        ends = [socket.create_connection(("127.0.0.1", port), 20) for _ in range(2)]
        first, second = (master.Messages(end) for end in ends)
        for number, asking in enumerate((first, second)):
            asking.ask("lockstep-doctor", {"host": f"node{number}"})
        assert first.ask("all-reduce", 3) > 0  # its other rank never comes
        found = master.together(second, "127.0.0.1", "lo", 0.2)
        second.send(["done"])
        for end in ends:
            end.close()
    assert (found.status, found.message) == ("skipped", "machine 0 is busy with another host's")
    assert "node1 (127.0.0.1)" in theirs[-1].message


@pytest.mark.parametrize(
    "words",
    [b'{"versions": 1}\n', b'{"versions": null}\n', b"SSH-2.0-OpenSSH_9.2\n", b"{}\n", b"[1]\n", b"", b"no end"],
)
def test_somebody_else_who_answers(words: bytes) -> None:
    with listener(lambda caller: caller.sendall(words)) as port:
        _, found = reached(port, 5)
    assert found.status == "warn"
    assert "is no doctor" in found.message


def test_a_doctor_that_stops_answering() -> None:
    def answer(caller: socket.socket) -> None:
        caller.recv(4096)
        caller.sendall(json.dumps({"versions": MINE}).encode() + b"\n")
        caller.recv(4096)

    with listener(answer) as port:
        found = reached(port, 5)
    assert [each.status for each in found] == ["ok", "ok", "fail"]
    assert found[-1].message.startswith("stopped answering")


@contextmanager
def doctor(
    nnodes: int = 2, versions: dict[str, str] = MINE, clock: Callable[[], int] = time.time_ns
) -> Iterator[tuple[int, list[Finding]]]:
    """A doctor that listens, and what it finds in the end."""
    port, found = free_port(), list[Finding]()
    answering = listen(Plan(master_port=port, nnodes=nnodes, listen=60, timeout=30), versions, clock)
    thread = threading.Thread(target=lambda: found.extend(answering), daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.02)
    yield port, found
    thread.join(10)
    assert not thread.is_alive()


def test_a_doctor_at_the_other_end() -> None:
    with doctor() as (port, theirs):
        found = reached(port, 40)
    shown = [(each.check, each.status) for each in found]
    assert shown[:4] == [("master", "ok"), ("versions", "ok"), ("clock", "ok"), ("link", "ok")], found
    assert found[-1].check == "gloo to master"
    assert "right sums" in found[-1].message
    assert abs(found[2].numbers["ahead_s"]) <= found[2].numbers["error_s"] + 0.05
    assert [each.check for each in theirs if each.status != "warn"] == ["gloo", "asked", "listened"]


def test_another_clock_and_other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master, "together", lambda *_: Finding("gloo to master", "ok", ""))  # the test above has it
    ahead = 90 * 10**9
    with doctor(versions={**MINE, "torch": "2.11.0"}, clock=lambda: time.time_ns() + ahead) as (port, _):
        found = {each.check: each for each in reached(port, 20)}
    assert found["clock"].status == "warn"
    assert found["clock"].numbers["ahead_s"] == pytest.approx(90, abs=1)
    assert "timedatectl" in found["clock"].remedy
    assert found["versions"].status == "warn"
    assert found["versions"].message == "torch 2.12.0 here, 2.11.0 there"


def test_the_offset_of_a_clock_is_within_half_a_round_trip() -> None:
    now = [0]

    def clock() -> int:
        return now[0]

    def ask() -> int:  # 30 ms there, 10 ms back; the other clock is 5 s behind
        now[0] += 30_000_000
        read = now[0] - 5_000_000_000
        now[0] += 10_000_000
        return read

    trips = master.clock_trips(ask, clock)
    error, ahead = min(trips)
    assert error == pytest.approx(0.02)
    assert abs(ahead + 5) <= error
    assert master.clock(trips).message == "machine 0's is 4990.0 ms behind, +-20.0 ms"


def test_strangers_do_no_harm() -> None:
    with doctor() as (port, theirs):
        for words in (
            b"",
            b"GET / HTTP/1.1\r\n",
            b'["lockstep-doctor", "nonsense"]\n',
            b'["lockstep-doctor", {"host": "x"}]\n["fire"]\n',
            b'["lockstep-doctor", {"host": "x"}]\n["all-reduce", 1' + b"0" * 400 + b"]\n",
            b"[" * 511 + b"\n",
        ):
            with socket.create_connection(("127.0.0.1", port), 5) as stranger:
                stranger.sendall(words)
        with socket.create_connection(("127.0.0.1", port), 5) as caller:
            asking = master.Messages(caller)
            assert asking.ask("lockstep-doctor", {"host": "node7"}) == {"versions": MINE}
            assert abs(asking.ask("clock") - time.time_ns()) < 60 * 10**9
            asking.send(["done"])
    assert theirs[-1].status == "ok"
    assert "node7 (127.0.0.1)" in theirs[-1].message
    assert [each.status for each in theirs].count("warn") >= 2


def test_nobody_asks_and_a_port_that_is_taken() -> None:
    found = list(listen(Plan(master_port=free_port(), nnodes=3, listen=0.2, timeout=5), MINE))
    assert (found[0].status, found[0].message) == ("fail", "0 of 2 other machine(s) asked in 0.2 s")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        found += listen(Plan(master_port=other.getsockname()[1], nnodes=2, listen=5, timeout=5), MINE)
    assert found[1].status == "fail"
    assert "already in use" in found[1].message
