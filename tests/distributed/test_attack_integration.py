"""What a run over two hosts listens at, and what a stranger there gets who sends the pickle that once ran as code."""

import base64
import pickle
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest
from namespaces import Host, missing, two_hosts

from tests.distributed.test_listening import Trap
from tests.distributed.test_two_hosts_integration import PORT, TRAIN, by_lockstep, commands, steps

pytestmark = pytest.mark.integration

_LONG = (*TRAIN, "--epochs", "2000", "--log-every", "1", "--checkpoint-every", "0")
# on the other host: to the store under the keys of torch's elastic rendezvous and of the run, and to every socket
_STRANGER = """
import base64, socket, sys
from datetime import timedelta
from torch.distributed import TCPStore

poison, host, port, *sockets = sys.argv[1:]
store = TCPStore(host, int(port), None, False, timedelta(seconds=60), wait_for_workers=False)
for key in ("torch.rendezvous.lockstep", "torch.rendezvous.7", "lockstep/here/0", "lockstep/here/1", "worker_count"):
    store.set(key, poison)
for address in sockets:
    where, _, number = address.rpartition(":")
    with socket.create_connection((where, int(number)), 60) as wire:
        wire.sendall(base64.b64decode(poison))
print("sent", len(sockets))
"""


def listening(host: Host) -> list[str]:
    """What `ss -ltnp` shows on a host, as address:port, and what it prints."""
    text = host.run("ss", "-ltnp")
    print(f"\n{host.name}, {host.address}$ ss -ltnp\n{text}")
    return [line.split()[3] for line in text.splitlines()[1:]]


def test_only_the_address_asked_for_listens_and_a_pickle_sent_there_is_no_code(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    out, trap = tmp_path / "run", tmp_path / "caught"
    poison = base64.b64encode(pickle.dumps(Trap(trap))).decode()
    with two_hosts() as link, commands(link, by_lockstep, _LONG, out) as started:
        first, second = link.hosts
        started[0].until(lambda: steps(out) > 5, 180)
        found = {host: listening(host) for host in link.hosts}
        for host, sockets in found.items():
            assert sockets, "gloo listens on each host"
            for each in sockets:
                address = each.rpartition(":")[0].strip("[]").partition("%")[0]
                assert address == host.address or ip_address(address).is_loopback, each
            assert not host.run("ss", "-lunp").splitlines()[1:], "nothing takes datagrams"
        assert f"{first.address}:{PORT}" in found[first]
        assert not any(each.endswith(f":{PORT}") for each in found[second])
        (line,) = [line for line in started[0].said().splitlines() if line.startswith("listening: ")]
        assert f"store at {first.address}:{PORT}; ranks on " in line
        assert first.name in line
        reached = [each for host in link.hosts for each in found[host] if each.startswith(f"{host.address}:")]
        said = second.run(sys.executable, "-c", _STRANGER, poison, first.address, PORT, *reached)
        assert said.split() == ["sent", str(len(reached))]
        before = steps(out)
        started[0].until(lambda: steps(out) > before + 20, 180)  # it goes on
        assert started[1].process.poll() is None
    assert not trap.exists()
    assert pickle.loads(base64.b64decode(poison)) is None
    assert trap.exists(), "the pickle does what it should, where somebody reads it"
