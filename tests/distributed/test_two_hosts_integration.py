"""Runs over two hosts (two network namespaces of this machine): they meet, and survive a cut between them."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from namespaces import Link, missing, two_hosts

from tests.journals import read
from tests.subprocesses import Command, Completed

pytestmark = pytest.mark.integration

LOCKSTEP = (sys.executable, "-m", "lockstep")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--nnodes", "2")
TRAIN = ("train", "digits", "--exact", "4", "--epochs", "2", "--threads", "1", "--fraction", "0.2")
LONG = ("train", "digits", "--exact", "4", "--epochs", "12", "--threads", "1", "--log-every", "1")
WATCHED = ("--checkpoint-every", "10steps", "--collective-timeout", "60", "--hang-timeout")
PORT = "29500"  # free in a namespace of our own
Words = Callable[[int, Link, tuple[str, ...]], tuple[str, ...]]


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if why := missing():
        pytest.skip(why)


def static(rank: int, link: Link) -> tuple[str, ...]:
    """Words for one of the hosts: its number and where the first one is."""
    return ("--node-rank", str(rank), "--master-addr", link.hosts[0].address, "--master-port", PORT)


def by_lockstep(rank: int, link: Link, train: tuple[str, ...]) -> tuple[str, ...]:
    return (*LOCKSTEP, *train, "--nproc", "1", "--nnodes", "2", *static(rank, link))


def by_torchrun(rank: int, link: Link, train: tuple[str, ...]) -> tuple[str, ...]:
    return (*TORCHRUN, *static(rank, link), "--max-restarts", "3", "-m", "lockstep", *train)


def by_elastic_torchrun(rank: int, link: Link, train: tuple[str, ...]) -> tuple[str, ...]:
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{link.hosts[0].address}:{PORT}", "--rdzv-id", "7")
    conf = ("--rdzv-conf", f"is_host={int(rank == 0)},read_timeout=300")
    return (*TORCHRUN, *endpoint, *conf, "--max-restarts", "3", "-m", "lockstep", *train)


@contextmanager
def commands(link: Link, words: Words, train: tuple[str, ...], out: Path) -> Iterator[list[Command]]:
    """The run's command on each host; ended whatever happens."""
    with ExitStack() as stack:
        started = []
        for rank, host in enumerate(link.hosts):
            command = Command(*host.prefix, *words(rank, link, train), "--out", str(out))
            started.append(command)
            stack.callback(_end, command)
        yield started


def _end(command: Command) -> None:
    if command.process.poll() is None:
        command.end(0)


def ended(started: list[Command], timeout: float = 120) -> list[Completed]:
    """All commands' ends, within so many seconds from now."""
    deadline = time.monotonic() + timeout
    return [command.end(max(0.0, deadline - time.monotonic())) for command in started]


def digests(out: Path) -> tuple[str, str]:
    last = read(out / "journal.jsonl")[-1]
    assert last["kind"] == "end"
    assert last["status"] == "completed"
    return last["ledger_sha256"], last["weights_sha256"]


def steps(out: Path) -> int:
    journal = out / "journal.jsonl"
    return sum(record["kind"] == "step" for record in read(journal)) if journal.exists() else 0


def missed(out: Path) -> list[list[int]]:
    """The ranks that each report of a hang names."""
    return [record["ranks"] for record in read(out / "journal.jsonl") if record["kind"] == "fault"]


def alone(train: tuple[str, ...], out: Path) -> tuple[str, str]:
    """The same run in two processes of this machine, undisturbed."""
    end = Command(*LOCKSTEP, *train, "--nproc", "2", "--out", str(out), warm=True).end(300)
    assert end.code == 0, end.text
    return digests(out)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return alone(TRAIN, tmp_path_factory.mktemp("short") / "run")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return alone(LONG, tmp_path_factory.mktemp("long") / "run")


@pytest.mark.parametrize("words", [by_lockstep, by_torchrun, by_elastic_torchrun])
def test_two_hosts_are_the_same_run(words: Words, short: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with two_hosts() as link, commands(link, words, TRAIN, out) as started:
        ends = ended(started)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.text for end in ends)
    assert not any(end.orphans for end in ends)
    assert [end.out.count("test accuracy") for end in ends] == [1, 0]
    (run,) = [record for record in read(out / "journal.jsonl") if record["kind"] == "run"]
    assert run["world"] == {"size": 2, "local_size": 1, "backend": "gloo"}
    ledger, weights = digests(out)
    print(f"\n{words.__name__} on two hosts\n  ledger {ledger}\n  weights {weights}")
    assert (ledger, weights) == short


def test_a_cut_ends_both_sides_and_the_same_commands_go_on(long: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with two_hosts() as link:
        with commands(link, by_lockstep, (*LONG, *WATCHED, "4"), out) as started:
            started[0].until(lambda: steps(out) > 25)
            link.cut()
            first, second = ended(started, 60)
        assert (first.code, second.code) == (124, 124), first.text + second.text
        assert not first.orphans + second.orphans
        # the first host holds the store: it knows who is missing; the second knows that it lost the store, and where
        assert f"on {link.hosts[1].name}) is silent" in first.err
        assert "rank 0 waits for rank 1" in first.err
        assert "the store where the ranks meet is lost" in second.err
        assert f"on {link.hosts[0].name}) is silent" in second.err
        link.mend()
        with commands(link, by_lockstep, (*LONG, *WATCHED, "4"), out) as started:
            ends = ended(started)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.text for end in ends)
    assert digests(out) == long
    begun = [record["resumed_from"] for record in read(out / "journal.jsonl") if record["kind"] == "run"]
    assert len(begun) == 2
    assert begun[1] >= 20


@pytest.mark.parametrize("words", [by_torchrun, by_elastic_torchrun])
def test_launchers_that_restart_meet_again_when_the_link_is_back(
    words: Words, long: tuple[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with two_hosts() as link, commands(link, words, (*LONG, *WATCHED, "4"), out) as started:
        started[0].until(lambda: steps(out) > 25)
        link.cut()
        started[0].until(lambda: [1] in missed(out))
        link.mend()
        ends = ended(started)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.text for end in ends)
    assert digests(out) == long
    assert sum(record["kind"] == "run" for record in read(out / "journal.jsonl")) == 2


def by_growing_torchrun(rank: int, link: Link, train: tuple[str, ...]) -> tuple[str, ...]:
    """One machine is enough; the other one may come and go."""
    words = by_elastic_torchrun(rank, link, train)
    conf = next(word for word in words if word.startswith("is_host="))
    swapped = {"2": "1:2", conf: f"{conf},last_call_timeout=1"}
    return tuple(swapped.get(word, word) for word in words)


def test_a_machine_comes_and_goes_under_an_elastic_torchrun(tmp_path: Path) -> None:
    """The ranks start again on the machines that there are, and go on from the newest checkpoint: the same run."""
    out, rate = tmp_path / "run", ("--schedule", "constant", "--warmup-epochs", "0", "--override", "epochs")
    train = (*LONG, *WATCHED, "4", *rate)  # as long as it takes, and then to the end of its epoch

    def sizes() -> list[int]:
        records = read(out / "journal.jsonl") if (out / "journal.jsonl").exists() else []
        return [record["world"]["size"] for record in records if record["kind"] == "run"]

    def stepping(size: int) -> bool:
        return sizes()[-1:] == [size] and read(out / "journal.jsonl")[-1]["kind"] == "step"

    with two_hosts() as link, ExitStack() as stack:
        started = []
        for size, host in enumerate(link.hosts, 1):
            words = by_growing_torchrun(size - 1, link, (*train, "--epochs", "100000"))
            # torchrun's agents wait for each other for ever when a machine joins, unless they share no store
            unshared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = Command(*host.prefix, *words, "--out", str(out), env=unshared)
            stack.callback(_end, command)
            started.append(command)
            command.until(lambda: stepping(size), 120)  # noqa: B023
        asked = Command(*link.hosts[0].prefix, *LOCKSTEP, "resize", str(out), "--nproc", "3").end(60)
        started[1].end(0, grace=0)  # and its ranks, which torchrun has given sessions of their own
        started[0].until(lambda: stepping(1), 120)
        assert sizes()[:2] == [1, 2]
        started[0].signal(signal.SIGTERM)
        assert started[0].end(60).orphans == ()
    assert asked.code == 2
    assert "run stays as it is: another launcher (torchrun, mpirun, srun) started its ranks" in asked.err
    last = read(out / "journal.jsonl")[-1]
    assert last["status"] == "interrupted"
    whole = (*train, "--epochs", str(last["steps"] // 23 + 1))
    found = [alone(whole, place) for place in (out, tmp_path / "alone")]
    assert found[0] == found[1]


def test_a_short_cut_is_only_a_pause(long: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    with two_hosts() as link, commands(link, by_lockstep, (*LONG, *WATCHED, "30"), out) as started:
        started[0].until(lambda: steps(out) > 25)
        link.unplug()
        time.sleep(0.5)
        link.mend()
        ends = ended(started)
    assert [end.code for end in ends] == [0, 0], "\n".join(end.text for end in ends)
    assert digests(out) == long
    kinds = {record["kind"] for record in read(out / "journal.jsonl")}
    assert kinds == {"run", "step", "eval", "classes", "checkpoint", "end"}


def test_the_interface_is_the_one_that_leads_to_the_other_host() -> None:
    code = (
        "from lockstep.distributed.rendezvous import address_towards, interface_of; import sys\n"
        "print(*(interface_of(address_towards(a)) for a in sys.argv[1:]))"
    )
    with two_hosts() as link:
        first, second = link.hosts
        assert second.run(sys.executable, "-c", code, first.address, first.name).split() == [second.name] * 2
        seen = first.run(sys.executable, "-c", code, first.address, first.name, "192.0.2.1").rstrip("\n").split(" ")
    # its own name is 127.0.1.1 there, as on Debian; no way leads to the third
    assert seen == [first.name, "lo", ""]


def test_the_link_carries_what_it_should_and_nothing_is_left_of_the_hosts() -> None:
    send = (
        "import socket, sys; wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for _ in range(10): wire.sendto(bytes(1000), (sys.argv[1], 9))"
    )
    with pytest.raises(ZeroDivisionError), two_hosts(100) as link:  # noqa: PT012
        first, second = link.hosts
        assert second.run("hostname").strip() == second.name
        sleeper = Command(*first.prefix, "sleep", "60")
        sleeper.until(lambda: "sleep 60" in sleeper.family().values())
        before, arrives = first.sent_bytes, []
        for change in (lambda: None, link.cut, link.mend):
            change()
            first.run(sys.executable, "-c", send, second.address)
            before, sent = first.sent_bytes, first.sent_bytes - before
            arrives.append(sent > 10_000)
        assert arrives == [True, False, True]
        assert "rate 100Mbit" in first.run("tc", "qdisc", "show", "dev", first.name)
        _ = 1 / 0
    assert sleeper.end(5).code == -9
    for folder in ("/run/netns", "/etc/netns"):
        assert not any(Path(folder, host.name).exists() for host in link.hosts)
