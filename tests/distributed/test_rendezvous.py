"""How the ranks of one attempt part from those before, and which way they talk to other hosts."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store, TCPStore

from lockstep.distributed import rendezvous
from lockstep.distributed.rendezvous import address_towards, choose_interface, fresh_store, interface_of
from lockstep.errors import UserError


def begin(store: TCPStore, size: int) -> list[Store]:
    """What each rank of an attempt takes for its store."""
    with ThreadPoolExecutor(size) as threads:
        ranks = [threads.submit(fresh_store, store.clone(), rank, size, 20.0) for rank in reversed(range(size))]
        return [rank.result() for rank in reversed(ranks)]


@pytest.fixture
def shared() -> TCPStore:
    """A store that outlives its ranks, as an elastic launcher has one."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_no_attempt_sees_what_another_left(shared: TCPStore) -> None:
    for attempt, size in enumerate((3, 3, 2, 4)):
        stores = begin(shared, size)
        assert not any(store.check(["alarm"]) for store in stores)
        stores[attempt % size].set("alarm", str(attempt))
        assert {store.get("alarm") for store in stores} == {str(attempt).encode()}


def test_ranks_that_do_not_come_are_named(shared: TCPStore) -> None:
    begin(shared, 4)  # ranks 1 to 3 left their words; none of them comes again
    with pytest.raises(UserError, match=r"rank\(s\) 1, 2, 3 of 4 did not come in 0.1 s"):
        fresh_store(shared, 0, 4, 0.1)


ROUTES = {"master": "10.0.0.1", "localhost": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
INTERFACES = {"10.0.0.1": "eth1", "127.0.0.1": "lo"}


@pytest.mark.parametrize(
    ("master", "others", "given", "chosen"),
    [
        ("master", [], "", "eth1"),
        ("master", [], "eth7", "eth7"),  # the user's word stands
        ("localhost", ["", "10.0.0.2"], "", "eth1"),  # on rank 0's host, where the master may be localhost
        ("localhost", ["127.0.0.1", ""], "", ""),  # all on one host, or nobody knows
        ("unknown", [], "", ""),
    ],
)
def test_ranks_talk_over_the_way_to_the_others(
    master: str, others: list[str], given: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: ROUTES.get(host, ""))
    monkeypatch.setattr(rendezvous, "interface_of", lambda address: INTERFACES.get(address, ""))
    store = HashStore()
    for rank, address in enumerate(others, 1):
        store.set(f"address/{rank}", address)
    environ = {"GLOO_SOCKET_IFNAME": given} if given else {}
    choose_interface(store, master, 0, 1 + len(others), environ)
    assert environ.get("GLOO_SOCKET_IFNAME", "") == chosen


def test_this_host_s_own_addresses() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("no-such-host.invalid") == ""
    assert interface_of("192.0.2.1") == interface_of("") == ""  # nobody's, set aside for examples


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 on this Linux, or no Linux")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_has_an_interface(address: str) -> None:
    assert interface_of(address) == "lo"
