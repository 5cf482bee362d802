"""The command: its flags, its lines, its JSON and its exit code."""

import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from namespaces import missing, two_hosts
from rich.console import Console

from lockstep.commands.doctor.checks import findings
from lockstep.commands.doctor.collectives import SIZES
from lockstep.commands.doctor.finding import Finding, Status, as_json, graded, healthy, show, summary
from lockstep.commands.doctor.plan import PARTS, Plan
from lockstep.errors import UserError
from tests.subprocesses import Command, run_lockstep


@pytest.mark.parametrize(("chosen", "message"), [
    ({"nproc": 0}, "--nproc 0"), ({"nnodes": 0}, "--nnodes 0"), ({"workers": -1}, "--workers -1"),
    ({"threads": -1}, "--threads -1"), ({"timeout": 0.0}, "--timeout 0"), ({"timeout": float("nan")}, "--timeout nan"),
    ({"listen": -1.0}, "--listen -1"), ({"master_port": 70000}, "--master-port 70000"),
    ({"master_addr": "a"}, "a machine 0 without a port"), ({"listen": 5.0}, "a machine 0 without a port"),
    ({"listen": 5.0, "master_addr": "a", "master_port": 1}, "--listen is machine 0's"),
    ({"only": ("hosts",)}, "unknown part 'hosts'"),
])  # fmt: skip
def test_flags_that_can_not_be(chosen: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as raised:
        Plan(**chosen)  # type: ignore[arg-type]
    assert raised.value.message.startswith(message)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("cores", "gpus", "nproc", "count"), [(2, 0, "auto", 1), (64, 0, "auto", 8), (64, 4, "auto", 4), (2, 0, 5, 5)]
)
def test_processes(cores: int, gpus: int, nproc: int, count: int) -> None:
    assert Plan(nproc=nproc).processes(cores, gpus) == count


FINDINGS = [
    Finding("a", "ok", "well", numbers={"size_mib": 3}),
    Finding("b", "warn", "so so", "Do."),
    Finding("c", "fail", "not [well]", "Do that."),
    Finding("d", "skipped", "no"),
]


def test_what_is_printed() -> None:
    text = io.StringIO()
    for finding in FINDINGS:
        show(finding, Console(file=text, highlight=False, width=20))
    assert text.getvalue().splitlines() == [
        "ok      a                  well",
        "warn    b                  so so",
        "                           -> Do.",
        "fail    c                  not [well]",
        "                           -> Do that.",
        "skipped d                  no",
    ]
    assert summary(FINDINGS) == "1 ok, 1 warning(s), 1 failure(s), 1 skipped"
    assert not healthy(FINDINGS)
    assert healthy([each for each in FINDINGS if each.status != "fail"])


def test_the_first_case_that_is_true_decides() -> None:
    worse: tuple[bool, Status, str] = (True, "fail", "Do that.")
    bad: tuple[bool, Status, str] = (True, "warn", "Do.")
    assert graded("a", "m", {"n": 1}, worse, bad) == Finding("a", "fail", "m", "Do that.", {"n": 1})
    assert graded("a", "m", {}, (False, "fail", "Do that."), bad) == Finding("a", "warn", "m", "Do.")
    assert graded("a", "m", {}, (False, "fail", "Do that.")) == Finding("a", "ok", "m")


@given(st.lists(st.sampled_from(FINDINGS)))
def test_json_holds_all(found: list[Finding]) -> None:
    plain = json.loads(as_json(found))
    assert [Finding(**each) for each in plain["findings"]] == found
    assert plain["healthy"] == healthy(found)


def test_the_command_here(tmp_path: Path) -> None:
    """All parts on this machine; a machine that is busy or short of something may have warnings."""
    ended = run_lockstep("doctor", "--json", "--timeout", "60", cwd=tmp_path, timeout=120)
    plain = json.loads(ended.out)
    failures = [each for each in plain["findings"] if each["status"] == "fail"]
    assert ended.code == (1 if failures else 0), ended.text
    assert not [each for each in failures if each["check"] not in ("devices", "driver", "memory", "/dev/shm")], failures
    checks = {each["check"] for each in plain["findings"]}
    assert {"launcher", "cores", "memory", "open files", "checkpoint disk", "host name", "port", "gloo"} <= checks
    gloo = next(each for each in plain["findings"] if each["check"] == "gloo")
    assert set(gloo["numbers"]) == {f"bus_gb_per_s_{nbytes}" for nbytes in SIZES}
    assert all(each["remedy"] for each in plain["findings"] if each["status"] in ("warn", "fail"))
    assert not ended.orphans
    assert not list(tmp_path.iterdir())


def test_a_failure_has_exit_code_1(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        number = str(other.getsockname()[1])
        ended = run_lockstep("doctor", "--only", "network", "--master-port", number, cwd=tmp_path, fresh=True)
    assert ended.code == 1, ended.text
    assert f"fail    port               port {number}: Address already in use" in ended.out
    assert "name another port by --master-port" in ended.out
    assert ended.out.splitlines()[-1].startswith(("3 ok", "2 ok"))
    assert ended.err == ""


def test_words_beside_the_flags_are_refused(tmp_path: Path) -> None:
    ended = run_lockstep("doctor", "digits", cwd=tmp_path)
    assert ended.code == 2
    assert "doctor takes flags alone, got digits" in ended.err


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from lockstep.cli import main\n"
        "try: main(['doctor', '--help'])\n"
        "except SystemExit as end: assert not end.code and 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "--master-addr" in ended.stdout


def test_the_parts_that_are_asked_for_are_checked() -> None:
    said = list[str]()
    found = list(findings(Plan(only=("network",)), said.append))
    assert {each.check for each in found} >= {"host name", "port"}
    assert "gloo" not in {each.check for each in found}
    assert not said
    assert Plan().wants("network")
    assert all(Plan(only=PARTS).wants(part) for part in PARTS)


@pytest.mark.integration
@pytest.mark.parametrize("interface", ["", "lo"], ids=["found by itself", "a wrong one named"])
def test_two_hosts(tmp_path: Path, interface: str) -> None:
    """One listens, the other goes there; their own names lead to the loopback, as most of Debian's do."""
    if why := missing():
        pytest.skip(why)
    env = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    flags = ("--only", "master", "--timeout", "15", "--master-port", "29555")
    words = (sys.executable, "-m", "lockstep", "doctor", *flags)
    with two_hosts() as link:
        one, other = link.hosts
        first = Command(*one.prefix, *words, "--listen", "120", "--nnodes", "2", cwd=tmp_path, env=env)
        first.until(lambda: os.pread(first.err.fileno(), 1 << 16, 0).decode().count("listening at port 29555"))
        time.sleep(1)  # it says so just before
        there = Command(*other.prefix, *words, "--master-addr", one.address, cwd=tmp_path, env=env).end(90)
        here = first.end(60)
    assert f"ok      master             {one.address}:29555: connected" in there.out, there.text
    assert "ok      clock " in there.out
    assert "ok      link " in there.out
    if interface:
        assert there.code == 1, there.text
        assert f"to the interface between them (here {other.name})" in there.out
    else:
        assert (there.code, here.code) == (0, 0), there.text + here.text
        assert "gloo to master     this host and machine 0: right sums" in there.out
    assert "ok      listened           1 other machine(s) asked" in here.out, here.text
