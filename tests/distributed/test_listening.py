"""What listens while a run goes on, where, and that nothing which arrives there becomes code."""

import base64
import pickle
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from lockstep.distributed.rendezvous import LOOPBACK, interface_of, keep_to_loopback, listen_at, listening, serve, shown
from tests.subprocesses import Command, lockstep

_LONG = ("train", "--epochs", "2000", "--nproc", "2", "--threads", "1", "--out", "run", "--log-every", "5")


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def listeners(command: Command, only: int = 0) -> Iterator[tuple[str, int]]:
    """Where the processes of a command, or one of them, listen: address and port."""
    for pid in [only] if only else command.family():
        found: list[Any] = []
        with suppress(psutil.NoSuchProcess):  # ended since
            found = psutil.Process(pid).net_connections("inet")
        for connection in found:
            if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                yield connection.laddr[0], connection.laddr[1]


def test_on_one_machine_only_the_loopback_listens_and_what_comes_there_is_no_code(tmp_path: Path) -> None:
    command = lockstep(*_LONG, cwd=tmp_path)
    journal, trap = tmp_path / "run/journal.jsonl", tmp_path / "caught"
    command.until(lambda: journal.exists() and '"kind": "step"' in journal.read_text())
    found = set(listeners(command))
    assert len(found) >= 3, found  # the store, and gloo's of two ranks
    assert {address for address, _ in found} == {LOOPBACK}
    poison = base64.b64encode(pickle.dumps(Trap(trap))).decode()
    (port,) = {place[1] for place in listeners(command, only=command.pid)}  # the launcher has the store
    store = TCPStore(LOOPBACK, port, None, False, timedelta(seconds=20), wait_for_workers=False)
    store.set("torch.rendezvous.lockstep", poison)  # where torch's elastic rendezvous looks
    for rank in range(2):
        store.set(f"lockstep/here/{rank}", poison)
    for address in found:
        with socket.create_connection(address, 20.0) as connection:
            connection.sendall(pickle.dumps(Trap(trap)))
    lines = len(journal.read_text().splitlines())
    command.until(lambda: len(journal.read_text().splitlines()) > lines + 5)  # it goes on
    command.signal_group(signal.SIGTERM)
    ended = command.end()
    assert (ended.code, ended.orphans, trap.exists()) == (143, (), False), ended.text
    assert "listening" not in ended.out, "a line for what others can reach"


def test_a_named_interface_stays_and_others_are_the_loopback() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    keep_to_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": interface_of(LOOPBACK)}


@pytest.mark.parametrize(
    ("host", "found", "where"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("node0", ["127.0.1.1"], "all interfaces"),  # as Debian's /etc/hosts has it: others find another address
        ("service", ["192.0.2.7"], "all interfaces"),  # not this machine's own
        ("unknown", [], "all interfaces"),
    ],
)
def test_the_address_that_was_asked_for(
    host: str, found: list[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(*_: Any, **__: Any) -> list[Any]:
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    listener = listen_at(host, 0)
    monkeypatch.undo()
    with listener:
        assert shown(listener) == f"{where}:{listener.getsockname()[1]}"
        store = serve(listener, 1, timedelta(seconds=10))
    theirs = TCPStore(LOOPBACK, store.port, None, False, timedelta(seconds=10), wait_for_workers=False)
    theirs.set("key", "value")
    assert store.get("key") == b"value"


def test_a_line_at_the_start_names_what_strangers_could_reach() -> None:
    assert listening(1, 1, {}) == listening(2, 2, {"LOCKSTEP_STORE": "127.0.0.1:7"}) == ""
    wide = {"LOCKSTEP_STORE": "10.0.0.1:29500", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}
    assert listening(4, 2, wide) == (
        "listening: store at 10.0.0.1:29500; ranks on eth1; see SECURITY.md for who may reach them"
    )
    launched = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # as torchrun on one machine
    assert "store at 10.0.0.1:29500; ranks on an interface of its choice;" in listening(2, 2, launched)
