"""The laws of the model, what a plan refuses, and one real forecast."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import models
from lockstep.commands.forecast import (
    BUCKET,
    LINKS,
    Link,
    Measured,
    Plan,
    fit_link,
    forecast_step,
    print_report,
    row_of,
)
from lockstep.config import CommConfig, Config
from lockstep.config.recipes import recipe
from lockstep.errors import UserError
from tests.subprocesses import run_lockstep

links = st.builds(Link, name=st.just("link"), alpha_s=st.floats(0, 0.1), bandwidth=st.floats(1e3, 1e12))
sends = st.builds(
    Measured,
    images=st.just({}),
    gradients=st.integers(1, 10**9),
    blocking=st.lists(st.integers(1, 10**8), max_size=3),
    probes=st.just([]),
)
seconds = st.floats(1e-6, 10.0)
processes = st.integers(1, 64)


def step_s(n: int, own: float, link: Link, found: Measured, hides: bool, loader: float = 0.0) -> float:
    return forecast_step(n, own, loader, link, found, hides)["step_s"]


@given(seconds, st.floats(0, 1), links, sends, st.booleans())
def test_one_process_communicates_nothing(own: float, loader: float, link: Link, found: Measured, hides: bool) -> None:
    alone = forecast_step(1, own, loader, link, found, hides)
    assert alone["all_reduce_s"] == alone["exposed_s"] == 0
    assert alone["step_s"] == pytest.approx(own)
    assert alone["loader_s"] == pytest.approx(own * loader)


@given(seconds, links, sends, processes)
def test_overlap_is_no_slower_than_none_and_no_faster_than_the_computation(
    own: float, link: Link, found: Measured, n: int
) -> None:
    plain, beside = (forecast_step(n, own, 0.0, link, found, hides) for hides in (False, True))
    assert plain["step_s"] == pytest.approx(own + plain["all_reduce_s"])
    assert plain["exposed_s"] == pytest.approx(plain["all_reduce_s"])
    assert own * (1 - 1e-9) <= beside["step_s"] <= plain["step_s"] * (1 + 1e-9)
    last = link.all_reduce_s(n, min(BUCKET, (found.gradients - 1) % BUCKET + 1))
    assert beside["exposed_s"] >= last * (1 - 1e-9), "the last bucket is complete when the backward pass ends"


@given(seconds, links, sends, st.integers(2, 64), st.floats(1, 10), st.booleans())
def test_a_worse_link_or_more_bytes_are_never_faster(
    own: float, link: Link, found: Measured, n: int, factor: float, hides: bool
) -> None:
    base = step_s(n, own, link, found, hides) * (1 - 1e-9)
    assert base <= step_s(n, own, replace(link, alpha_s=link.alpha_s * factor), found, hides)
    assert base <= step_s(n, own, replace(link, bandwidth=link.bandwidth / factor), found, hides)
    assert base <= step_s(n, own, link, found._replace(blocking=[*found.blocking, 4]), hides)
    more = found._replace(gradients=math.ceil(found.gradients * factor))
    assert base <= step_s(n, own, link, more, False)


@given(seconds, links, sends, st.integers(2, 64), st.booleans())
def test_a_link_without_cost_leaves_the_computation(
    own: float, link: Link, found: Measured, n: int, hides: bool
) -> None:
    free = replace(link, alpha_s=0.0, bandwidth=math.inf)
    assert step_s(n, own, free, found, hides) == pytest.approx(own)


def test_a_step_by_hand() -> None:
    # 25 MiB/s and two processes: n bytes take n / 25 MiB seconds
    link, found = Link("", 0.0, BUCKET), Measured({}, 2 * BUCKET + BUCKET // 2, [], [])
    assert step_s(2, 9.0, link, found, False) == pytest.approx(9.0 + 2.5)
    assert step_s(2, 9.0, link, found, True) == pytest.approx(9.0 + 0.5)  # two buckets behind a backward pass of 6 s
    assert step_s(2, 1.5, link, found, True) == pytest.approx(1.5 + 2.5 - 1.0)  # of which 1 s is too short
    assert step_s(2, 9.0, link, found._replace(blocking=[BUCKET]), True) == pytest.approx(9.0 + 0.5 + 1.0)


def test_ring() -> None:
    link = Link("", 0.001, 1000.0)
    assert link.all_reduce_s(1, 100.0) == 0
    assert link.all_reduce_s(2, 100.0) == pytest.approx(0.002 + 0.1)
    assert link.all_reduce_s(4, 100.0) == pytest.approx(0.006 + 0.15)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11), st.integers(2, 16), st.floats(0, 0.05))
def test_the_fit_finds_the_link_again(alpha: float, bandwidth: float, n: int, noise: float) -> None:
    link = Link("l", alpha, bandwidth)
    sizes = [1.0, *(10.0**k for k in range(3, 13))]  # from latency alone to bandwidth alone
    exact = [(n, size, link.all_reduce_s(n, size)) for size in sizes]
    found = fit_link("l", exact)
    assert found.alpha_s == pytest.approx(alpha, rel=1e-6)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.error < 1e-6
    shaken = [(n, b, t * (1 + noise * (-1) ** i)) for i, (n, b, t) in enumerate(exact)]
    found = fit_link("l", shaken)
    assert all(found.all_reduce_s(n, b) == pytest.approx(t, rel=3 * noise + 1e-6) for n, b, t in exact)


def test_a_fit_has_no_negative_part() -> None:
    assert fit_link("", [(2, 1000.0, 0.002), (2, 2000.0, 0.001)]).bandwidth == math.inf
    steep = fit_link("", [(2, 1000.0, 0.001), (2, 2000.0, 0.004)])
    assert steep.alpha_s == 0
    assert 2000 / 0.004 < steep.bandwidth < 1000 / 0.001


def plan(**chosen: Any) -> Plan:
    return Plan(config=chosen.pop("config", recipe("digits")), **chosen)


FAR = Config().with_execution(nnodes=2, master_addr="10.0.0.1", master_port=29500)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"interconnect": "10gbits"}, "unknown interconnect '10gbits'\n  Did you mean 10gbit"),
        ({"interconnect": "5us"}, "unknown interconnect '5us'"),
        ({"interconnect": "5us:0mbit"}, "unknown interconnect '5us:0mbit'"),
        ({"nproc": (2, 1)}, "--nproc 2,1 is not a growing list"),
        ({"nproc": (0, 1)}, "--nproc 0,1 is not a growing list"),
        ({"nproc": (1, 128)}, "a batch of 64 is smaller than the 128 processes"),
        ({"seconds": 0.0}, "is not positive"),
        ({"config": replace(Config(), exact=4)}, "it forecasts plain DDP"),
        ({"config": replace(Config(), comm=CommConfig("bf16"))}, "it forecasts plain DDP"),
        ({"config": Config().with_execution(strategy="fsdp", nproc=1)}, "it forecasts plain DDP"),
        ({"config": FAR, "interconnect": "1gbit"}, "an interconnect is named, too"),
    ],
)
def test_a_plan_refuses(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(**chosen)
    assert message in str(caught.value)


def test_stated_links() -> None:
    assert plan().stated is None
    for name, (latency, mbit) in LINKS.items():
        assert plan(interconnect=name).stated == Link(name, latency * 1e-6, mbit * 1e6 / 8)
    assert plan(interconnect="0.5us:80mbit").stated == Link("0.5us:80mbit", 0.5e-6, 1e7)
    # the software's own cost comes on top
    stated, loopback = Link("far", 2**-13, 1e8), Link("here", 2**-12, 1e7, 0.1)
    assert stated.with_software(loopback) == Link("far", 3 * 2**-13, 1e7, 0.1)
    assert stated.with_software(Link("nothing", 0.0, math.inf)) == stated
    assert plan(nproc=(1, 3)).shard(3) == 22  # the largest


@pytest.mark.parametrize(
    ("four_s", "others", "shown", "doubts"),
    [
        (0.25, 0.1, ["4.00", "100%"], []),
        (0.2, 0.0, ["5.00", "125%"], []),  # caches
        (0.1, 0.0, ["-", "-"], ["N = 4: a speed-up of 10 is more than its processes can give"]),
        (0.25, 0.7, ["4.00", "100%"], ["others kept 0.7 cores busy meanwhile: the machine was busy"]),
    ],
)
def test_what_a_busy_machine_gives_is_marked_and_not_printed(
    four_s: float, others: float, shown: list[str], doubts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = Measured({}, 1, [], [], others)
    steps = [forecast_step(n, own, 0.0, Link("", 0.0, math.inf), found, False) for n, own in ((1, 1.0), (4, four_s))]
    link = {"name": "measured", "alpha_s": 1e-4, "bandwidth_mbit": None, "error": 0.0}
    rows = [row_of(step, steps[0], 64) for step in steps]
    print_report({"rows": rows, "link": link, "measured": {1: found._asdict()}})
    out = capsys.readouterr().out
    assert out.splitlines()[2].split()[3:5] == shown
    assert [doubt in out for doubt in doubts] == [True] * len(doubts)
    assert ("measure again" in out) == bool(doubts)
    assert "no limit seen" in out
    assert out.splitlines()[-1].endswith("the bottleneck is compute; efficiency stays above 50 %; the step is "
                                         "shortest with N = 4.")  # fmt: skip


@pytest.mark.slow
def test_a_real_forecast(tmp_path: Path) -> None:
    flags = ["--nproc", "1,2", "--seconds", "0.05", "--device", "cpu", "--threads", "1", "--out", "found.json"]
    ended = run_lockstep("forecast", "digits", *flags, cwd=tmp_path, timeout=120)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    found = json.loads((tmp_path / "found.json").read_text())
    one, two = found["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["all_reduce_s"] == 0 < two["all_reduce_s"] == pytest.approx(two["exposed_s"])
    assert two["speedup"] == (None if two["note"] else pytest.approx(one["step_s"] / two["step_s"]))
    assert found["link"]["alpha_s"] > 0
    net = models.build("digits_net", in_channels=1, num_classes=10, image_size=8)
    solo, pair = found["measured"]["1"], found["measured"]["2"]
    assert (list(solo["images"]), list(pair["images"])) == (["64"], ["32"])
    assert solo["gradients"] == 4 * sum(p.numel() for p in net.parameters())
    assert {int(nbytes) for _, nbytes, _ in pair["probes"]} >= {solo["gradients"], 1 << 20}
    assert "At N = 2 the bottleneck is" in ended.out
    ended = run_lockstep("forecast", "digits", "--nproc", "1,64", "--device", "cpu", cwd=tmp_path)
    assert ended.code == 2, ended.text
    assert "Name an --interconnect" in ended.err
