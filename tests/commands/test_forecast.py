"""The laws of the model, what a plan refuses, and one real forecast."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands.forecast import measure
from lockstep.commands.forecast.measure import Measured
from lockstep.commands.forecast.model import (
    Curve,
    Forecast,
    Limits,
    Link,
    Reductions,
    Timeline,
    fit_line,
    fit_link,
    forecast,
    limits,
    moved,
)
from lockstep.commands.forecast.plan import LINKS, Group, Layout, Plan, layout, own_cost
from lockstep.commands.forecast.report import Report, describe, print_report
from lockstep.config import Config, LinkConfig
from lockstep.config.flags import split_arguments
from lockstep.config.recipes import recipe
from lockstep.errors import UserError
from tests.subprocesses import run_lockstep

positive = st.floats(1e-6, 10.0)
links = st.builds(
    Link,
    name=st.just("link"),
    alpha_s=st.floats(0, 0.1),
    bandwidth=st.floats(1e3, 1e12),
    stolen_core_s=st.floats(0, 1e-6),
)
processes = st.integers(1, 64)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Timeline, Reductions]:
    """A step and what it sends: buckets complete one after the other, before the backward pass is over."""
    gaps = draw(st.lists(positive, min_size=1, max_size=6))
    moments = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    backward = moments[-1] + draw(positive)
    own = Timeline(draw(st.floats(0, 1)), tuple(moments), backward, backward + draw(positive))
    nbytes = st.integers(1, 10**8)
    buckets = draw(st.lists(nbytes, min_size=len(gaps), max_size=len(gaps)))
    return own, Reductions(tuple(buckets), tuple(draw(st.lists(nbytes, max_size=3))))


def slow(n: int, own: Timeline, link: Link, sends: Reductions, **how: Any) -> float:
    return forecast(n, own, link, sends, **how).step_s


@given(steps(), links)
def test_one_process_communicates_nothing(step: tuple[Timeline, Reductions], link: Link) -> None:
    own, sends = step
    alone = forecast(1, own, link, sends)
    assert (alone.all_reduce_s, alone.exposed_s, alone.hidden) == (0, 0, 0)
    assert alone.step_s == pytest.approx(own.load_s + own.total_s)


@given(steps(), links, processes, st.integers(1, 8), st.floats(1, 4))
def test_overlap_is_no_slower_than_none_and_no_faster_than_the_computation(
    step: tuple[Timeline, Reductions], link: Link, n: int, threads: int, crowding: float
) -> None:
    own, sends = step
    found = forecast(n, own, link, sends, threads=threads, crowding=crowding)
    computing = crowding * (own.load_s + own.total_s)
    assert computing * (1 - 1e-9) <= found.step_s <= (computing + found.all_reduce_s) * (1 + 1e-9)
    assert -1e-9 <= found.hidden <= 1


@given(steps(), links, st.integers(2, 64), st.floats(1, 10))
def test_a_worse_link_or_more_bytes_are_never_faster(
    step: tuple[Timeline, Reductions], link: Link, n: int, factor: float
) -> None:
    own, sends = step
    base = slow(n, own, link, sends) * (1 - 1e-9)
    assert base <= slow(n, own, replace(link, alpha_s=link.alpha_s * factor), sends)
    assert base <= slow(n, own, replace(link, bandwidth=link.bandwidth / factor), sends)
    assert base <= slow(n, own, replace(link, stolen_core_s=link.stolen_core_s * factor), sends)
    more = replace(sends, buckets=tuple(math.ceil(b * factor) for b in sends.buckets))
    assert base <= slow(n, own, link, more)
    assert base <= slow(n, own, link, replace(sends, blocking=(*sends.blocking, 4)))


@given(steps(), links, st.integers(2, 64))
def test_a_link_without_cost_leaves_the_computation(step: tuple[Timeline, Reductions], link: Link, n: int) -> None:
    own, sends = step
    free = replace(link, alpha_s=0.0, bandwidth=math.inf)
    assert slow(n, own, free, sends) == pytest.approx(own.load_s + own.total_s)


@given(positive, st.integers(1, 512), links, processes)
def test_efficiency_is_at_most_one_where_images_cost_the_same_everywhere(
    each: float, batch: int, link: Link, n: int
) -> None:
    def step(count: int) -> Forecast:
        share = -(-batch // count)
        return forecast(
            count, Timeline(0.0, (each * share / 2,), each * share, each * share), link, Reductions((1000,))
        )

    assert step(1).step_s / step(n).step_s <= n * (1 + 1e-9)


@given(steps(), links, st.integers(2, 64), st.floats(0, 1))
def test_a_prefetching_loader_catches_up_while_the_step_waits(
    step: tuple[Timeline, Reductions], link: Link, n: int, load: float
) -> None:
    own, sends = replace(step[0], load_s=load), step[1]
    serial, beside = (forecast(n, own, link, sends, prefetched=ahead) for ahead in (False, True))
    assert beside.step_s == pytest.approx(own.total_s + max(load, serial.exposed_s))
    assert beside.step_s <= serial.step_s * (1 + 1e-9)


def test_buckets_by_hand() -> None:
    # 1,000 bytes/s and two processes: n bytes take n / 1000 s
    link, own = Link("", 0.0, 1000.0), Timeline(0.0, (1.0, 2.0), 3.0, 3.5)
    assert slow(2, own, link, Reductions((500, 500))) == pytest.approx(3.5)  # 1.0-1.5, 2.0-2.5
    assert slow(2, own, link, Reductions((1500, 1500))) == pytest.approx(4.5)  # 1.0-2.5, 2.5-4.0: 1 s too late
    assert slow(2, own, link, Reductions((0, 2000))) == pytest.approx(4.5)  # 2.0-4.0
    # each byte takes half its time of a core: of the 1.0 s that hide, 0.5 s are felt; of two threads, 0.25 s
    stealing = replace(link, stolen_core_s=0.0005)
    assert slow(2, own, stealing, Reductions((500, 500))) == pytest.approx(4.0)
    assert slow(2, own, stealing, Reductions((500, 500)), threads=2) == pytest.approx(3.75)
    assert slow(2, own, link, Reductions((500, 500), (100, 100))) == pytest.approx(3.7)


def test_ring() -> None:
    assert moved(1, 100.0) == 0
    assert moved(2, 100.0) == 100
    assert moved(4, 100.0) == 150
    assert Link("", 0.001, 1000.0).all_reduce_s(4, 100.0) == pytest.approx(0.006 + 0.15)


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
    falling = fit_line([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [3.0, 2.0, 1.0])
    assert falling[1] == 0
    assert falling[0] > 0
    assert fit_link("", [(2, 1000.0, 0.002), (2, 2000.0, 0.001)]).bandwidth == math.inf


@given(st.floats(1e-4, 1), st.floats(1e-5, 1), st.lists(st.integers(1, 500), min_size=2, max_size=5, unique=True))
def test_a_curve_gives_back_what_was_measured_and_the_line_between_and_beyond(
    fixed: float, each: float, sizes: list[int]
) -> None:
    def timeline(size: int) -> Timeline:
        total = fixed + each * size
        return Timeline(total / 10, (total / 4, total / 2), total * 0.75, total)

    curve = Curve({size: timeline(size) for size in sizes})
    assert curve.line == pytest.approx((fixed, each), rel=1e-4, abs=1e-7)
    for size in (*sizes, 1, 250, 1000):
        found, right = curve.at(size), timeline(size)
        assert found.total_s == pytest.approx(right.total_s, rel=1e-4)
        assert found.ready_s == pytest.approx(right.ready_s, rel=1e-4)


def test_limits() -> None:
    def row(n: int, seconds: float) -> Forecast:
        return Forecast(n, seconds, 0.0, 0.0, 0.0, 0.0)

    assert limits([row(1, 8.0), row(2, 4.0), row(4, 3.0), row(8, 2.5), row(16, 2.6)]) == Limits(8, 8, 16)
    assert limits([row(1, 8.0), row(2, 4.0)]) == Limits(None, 2, 2)


def test_the_bottleneck_is_the_largest_part() -> None:
    base = Forecast(2, 4.0, 1.0, 1.0, 1.0, 1.0)
    assert base.bottleneck == "compute"
    assert replace(base, cores_s=5.0).bottleneck == "cores oversubscribed"
    assert replace(base, loader_s=5.0).bottleneck == "loader"
    assert replace(base, exposed_s=5.0).bottleneck == "all-reduce"


def plan(**chosen: Any) -> Plan:
    return Plan(config=recipe("digits"), **chosen)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"interconnect": "10gbits"}, "unknown interconnect '10gbits'\n  Did you mean 10gbit"),
        ({"nproc": (2, 1)}, "--nproc 2,1 is not a growing list"),
        ({"nproc": ()}, "is not a growing list"),
        ({"nproc": (1, 128)}, "a batch of 64 is smaller than the 128 processes"),
        ({"bandwidth_mbit": 100.0}, "needs both numbers"),
        ({"latency_us": 5.0}, "needs both numbers"),
        ({"bandwidth_mbit": -1.0, "interconnect": "1gbit"}, "is negative"),
        ({"seconds": 0.0}, "is not positive"),
        ({"per_machine": -1}, "is negative"),
    ],
)
def test_a_plan_refuses(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        plan(**chosen)


def test_a_plan_is_of_plain_ddp() -> None:
    base = recipe("digits")
    with pytest.raises(UserError, match="--exact 4"):
        Plan(config=replace(base, exact=4))
    with pytest.raises(UserError, match="--strategy single"):
        Plan(config=replace(base, execution=replace(base.execution, strategy="single", nproc=1)))
    for other in (
        replace(base, link=LinkConfig(sync_every=4)),
        replace(base, execution=replace(base.execution, model_parallel=2)),
    ):
        with pytest.raises(UserError, match="it forecasts plain DDP"):
            Plan(config=other)
    far = replace(base.execution, nnodes=2, master_addr="10.0.0.1", master_port=29500)
    with pytest.raises(UserError, match="an interconnect is named, too"):
        Plan(config=replace(base, execution=far), interconnect="1gbit")


def test_stated_links() -> None:
    assert plan().stated is None
    for name, (latency, mbit) in LINKS.items():
        link = plan(interconnect=name).stated
        assert link is not None
        assert (link.name, link.alpha_s, link.bandwidth) == (name, latency * 1e-6, mbit * 1e6 / 8)
    slower = plan(interconnect="1gbit", bandwidth_mbit=80.0).stated
    assert slower == Link("50 us, 80 Mbit/s", 50 * 1e-6, 1e7)
    assert plan(latency_us=0.0, bandwidth_mbit=8.0).stated == Link("0 us, 8 Mbit/s", 0.0, 1e6)


def test_a_stated_link_has_the_cost_of_the_software_too() -> None:
    stated, loopback = Link("far", 2**-13, 1e8), Link("here", 2**-12, 1e7, 1e-9, 0.1)
    assert own_cost(stated, loopback) == Link("far", 3 * 2**-13, 1e7, 1e-9, 0.1)
    assert own_cost(stated, Link("nothing", 0.0, math.inf)) == stated
    assert "far: latency 122 us, 800 Mbit/s" in describe(stated)


def test_where_processes_run() -> None:
    # all on this machine of 4 cores: threads are shared out, and more processes than cores share them
    assert [layout(plan(), n, 4, 0) for n in (1, 2, 8)] == [
        Layout(1, Group(4, 1, False), 1.0),
        Layout(2, Group(2, 2, True), 1.0),
        Layout(8, Group(1, 4, True), 2.0),
    ]
    # over a network each has a machine of its own, or shares one with those that the plan says
    assert layout(plan(interconnect="10gbit"), 8, 4, 0) == Layout(8, Group(4, 1, True), 1.0)
    assert layout(plan(interconnect="10gbit", per_machine=2), 8, 4, 0) == Layout(8, Group(2, 2, True), 1.0)
    assert layout(plan(), 8, 16, 4) == Layout(8, Group(2, 4, True), 1.0)
    assert plan(nproc=(1, 3)).piece(3) == 22  # the largest share


def report(four_s: float, others: float) -> Report:
    """One process takes 1 s, four take `four_s`."""
    curve = Curve({64: Timeline(0.0, (), 0.5, 1.0)})
    measured = Measured(curve, {64: 100.0}, False, Reductions(()), [], 0.0, others)
    one, four = (Forecast(n, seconds, 0.0, 0.0, 0.0, 0.0) for n, seconds in ((1, 1.0), (4, four_s)))
    group = Group(1, 1, False)
    rows = [(Layout(each.processes, group, 1.0), each) for each in (one, four)]
    link = Link("loopback", 1e-4, 1e9)
    return Report(plan(nproc=(1, 4)), 4, link, {group: measured}, one, rows, limits([one, four]))


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
    found = report(four_s, others)
    print_report(found)
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if line.startswith("│ 4 "))
    assert [cell.strip() for cell in row.split("│")][4:6] == shown
    assert [doubt in out for doubt in doubts] == [True] * len(doubts)
    assert ("measure again" in out) == bool(doubts)
    told = found.to_dict()
    assert told["measured"][0]["others_cores"] == others
    assert [each["speedup"] for each in told["rows"]] == [1.0, None if shown[0] == "-" else pytest.approx(1 / four_s)]


seconds_of_a_batch = st.sampled_from([0.0, 2**-7, 2**-3, 2.0])  # several are made in one go; sums are exact


@given(st.lists(st.tuples(st.integers(1, 500), seconds_of_a_batch), min_size=1, max_size=6))
def test_a_loader_s_rate_is_the_images_it_gave_over_the_seconds_they_took(epoch: list[tuple[int, float]]) -> None:
    made: list[tuple[int, float]] = []

    def batches(number: int) -> Iterator[SimpleNamespace]:
        for batch in [*epoch, (7, 2**-6)]:
            made.append(batch)
            yield SimpleNamespace(count=batch[0])

    loader: Any = SimpleNamespace(epoch=batches)
    clock = SimpleNamespace(perf_counter=lambda: 1000.0 + sum(seconds for _, seconds in made))
    with mock.patch.object(measure, "time", clock):
        rate = measure._rate(loader, measure._Clock(torch.device("cpu")))
    images, seconds = map(sum, zip(*made[measure._WARM_UP :], strict=True))
    assert rate == images / seconds
    assert seconds >= measure._RATED_S


def test_the_recipe_is_split_from_the_flags() -> None:
    assert split_arguments(["mnist", "--nproc", "1,2", "--interconnect", "nvlink", "--lr", "1"], Plan)[0] == ["mnist"]
    assert isinstance(Plan(config=Config()).config_for(7), Config)


def test_unknown_interconnect(tmp_path: Path) -> None:
    ended = run_lockstep("forecast", "--interconnect", "token-ring", cwd=tmp_path, fresh=True)
    assert ended.code == 2, ended.text
    assert "unknown interconnect 'token-ring'" in ended.err
    assert "100mbit" in ended.err


@pytest.mark.slow
def test_a_real_forecast(tmp_path: Path) -> None:
    flags = ["--nproc", "1,2", "--seconds", "0.05", "--device", "cpu", "--threads", "1", "--out", "found.json"]
    ended = run_lockstep("forecast", "digits", *flags, cwd=tmp_path, timeout=120, fresh=True)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    found = json.loads((tmp_path / "found.json").read_text())
    one, two = found["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["all_reduce_s"] == 0 < two["all_reduce_s"]
    assert two["speedup"] == (None if two["note"] else pytest.approx(one["step_s"] / two["step_s"]))
    assert found["bytes_per_step"] == 4 * parameters()
    assert found["link"]["alpha_s"] > 0
    solo, pair = found["measured"]
    assert (list(solo["steps"]), list(pair["steps"])) == (["64", "32"], ["32", "16"])
    for step in pair["steps"].values():
        assert 0 < step["ready_s"][0] <= step["backward_s"] < step["total_s"]
    assert {int(nbytes) for _, nbytes, _ in pair["all_reduces"]} >= set(found["buckets"])
    assert "At N = 2 the bottleneck is" in ended.out


def parameters() -> int:
    from lockstep import models

    net = models.build("digits_net", in_channels=1, num_classes=10, image_size=8)
    return sum(p.numel() for p in net.parameters())


def test_a_link_without_a_limit_is_described() -> None:
    assert "no limit seen" in describe(Link("l", 1e-4, math.inf))
