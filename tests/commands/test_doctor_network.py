"""Names, interfaces and ports: taken ones, missing ones, silent ones."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from lockstep.commands.doctor import network
from lockstep.commands.doctor.finding import within
from lockstep.processes.network import Interface, interface_of, interfaces

LO = Interface("lo", True, ("127.0.0.1", "::1"))
ETH = Interface("eth0", True, ("10.0.0.5",))
DOWN = Interface("eth1", False, ("10.0.0.6",))
BARE = Interface("eth2", True, ())
BRIDGE = Interface("docker0", True, ("172.17.0.1",))
INFINIBAND = Interface("ib0", True, ("10.1.0.5",))


def unknown_name(name: str) -> list[str]:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_the_interfaces_of_this_host() -> None:
    found = {each.name: each for each in interfaces()}
    assert set(found) == {name for _, name in socket.if_nameindex()}
    if sys.platform == "linux":
        assert "127.0.0.1" in found["lo"].addresses
        assert found["lo"].up
    assert network.own_address()


def test_a_name_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", unknown_name)
    alone = network.host_name(1, 5, "strange")
    assert alone.status == "warn"
    assert "127.0.1.1 strange" in alone.remedy
    several = network.host_name(2, 5, "strange")
    assert several.status == "fail"
    assert "`ADDRESS strange` in /etc/hosts" in several.remedy


def test_a_real_name_without_address() -> None:
    """A host name of its own, that nobody knows, needs a namespace of its own."""
    program = (
        "import socket; from lockstep.commands.doctor.network import host_name\n"
        "print(host_name(2, 20, socket.gethostname()))"
    )
    shell = f"hostname no-such-host.invalid && exec '{sys.executable}' -c \"$1\""
    ended = subprocess.run(
        ["unshare", "--uts", "sh", "-c", shell, "sh", program], capture_output=True, text=True, timeout=60
    )
    if "unshare failed" in ended.stderr:
        pytest.skip("this user may make no namespace")
    assert "status='fail'" in ended.stdout, ended.stderr
    assert "no-such-host.invalid has no address" in ended.stdout or "did not answer" in ended.stdout


def test_a_name_that_leads_to_the_loopback_matters_to_others_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", lambda _: ["127.0.1.1"])
    assert network.host_name(1, 5, "me").status == "ok"
    found = network.host_name(2, 5, "me")
    assert found.status == "warn"
    assert "--local-addr" in found.remedy
    monkeypatch.setattr(network, "resolve", lambda _: ["10.0.0.5"])
    assert network.host_name(2, 5, "me").status == "ok"


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()

    def slow(name: str) -> list[str]:
        silent.wait()
        return []

    monkeypatch.setattr(network, "resolve", slow)
    found = network.host_name(2, 0.05, "me")
    silent.set()
    assert found.status == "fail"
    assert "the name server did not answer in 0.05 s" in found.message


def test_within_gives_value_and_error() -> None:
    assert within(5, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(5, lambda: 1 // 0)


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("^eth", ["lo", "docker0"]),
        ("^=eth0,lo", ["eth1", "docker0"]),
        ("ib,docker", ["docker0"]),
    ],
)
def test_which_interfaces_nccl_may_take(spec: str, chosen: list[str]) -> None:
    assert network.nccl_matches(spec, ["lo", "eth0", "eth1", "docker0"]) == chosen


def test_what_is_preferred() -> None:
    assert network.outward([LO, BRIDGE, ETH, DOWN, BARE, INFINIBAND]) == [INFINIBAND, ETH, BRIDGE]


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_does_not_exist(variable: str) -> None:
    found = next(network.interface(interfaces(), {variable: "nonsense"}))
    assert (found.check, found.status) == (variable, "fail")
    assert found.message == f"{variable}=nonsense names no interface of this host"
    assert "127.0.0.1" in found.remedy


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_down_or_has_no_address(variable: str) -> None:
    for silent in (DOWN, BARE):
        found = next(network.interface([LO, ETH, silent], {variable: silent.name}))
        assert found.status == "fail"
        assert f"ip link set {silent.name} up" in found.remedy
    assert next(network.interface([LO, ETH], {variable: "eth0"})).status == "ok"


@pytest.mark.skipif(sys.platform != "linux", reason="addresses are read on Linux only")
def test_hosts_without_a_network() -> None:
    assert [each.status for each in network.interface([LO, ETH], {})] == ["ok"]
    assert [each.status for each in network.interface([LO, DOWN], {})] == ["warn"]
    (found,) = network.interface([ETH], {})
    assert found.status == "fail"
    assert found.remedy == "`ip link set lo up`."


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        number = other.getsockname()[1]
        found = network.port(number, 5)
    assert found.status == "fail"
    assert f"port {number}: Address already in use" in found.message
    if sys.platform == "linux":
        assert f"(pid {os.getpid()})" in found.message
    assert network.port(number, 5).status == "ok"


def test_a_free_port() -> None:
    found = network.port(0, 5)
    assert found.status == "ok"
    assert found.numbers["port"] > 1024


def test_what_a_run_would_open() -> None:
    alone = network.listening(1, "", {})
    assert (alone.status, alone.numbers) == ("ok", {"interface": interface_of("127.0.0.1")})
    assert "127.0.0.1" in alone.message
    wide = network.listening(1, "", {"GLOO_SOCKET_IFNAME": "eth7"})
    assert (wide.status, "GLOO_SOCKET_IFNAME=eth7" in wide.message) == ("warn", True)
    several = network.listening(2, "10.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"})
    assert "10.0.0.1" in several.message
    assert "on eth7" in several.message


def test_a_system_that_hides_its_interfaces_still_has_those_with_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> object:
        raise FileNotFoundError(2, "No such file or directory", "/proc/net/dev")

    monkeypatch.setattr("psutil.net_if_stats", hidden)
    assert interface_of("127.0.0.1") in [each.name for each in interfaces() if each.usable]
