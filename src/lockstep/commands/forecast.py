"""`lockstep forecast`: measure what one process does and what the link takes, and compute the step of N processes.

A ring all-reduce of n bytes over N processes sends 2 (N - 1) messages of n / N bytes one after the other, so it takes

    T(N, n) = 2 (N - 1) (alpha + n / N / bandwidth)

(Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005; Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Seconds and bytes throughout.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from lockstep.commands.measuring import Log, beyond, busy, on_ranks, show, speed, timed
from lockstep.commands.shared.arguments import planned, print_error, refuse_launched
from lockstep.commands.shared.grid import Column
from lockstep.config import CommConfig, Config, Ints
from lockstep.config.fields import Arg, check_fields, require
from lockstep.distributed.files import write_json
from lockstep.errors import unknown

if TYPE_CHECKING:
    from lockstep.distributed.world import World

# name -> (latency of one message in us, Mbit/s in each direction). Nominal rates; Ethernet's without the 6 % that
# headers and gaps take of 1,500-byte frames. PCIe: 16 lanes of version 4; NVLink: version 4 with 18 links.
LINKS = {
    "100mbit": (100.0, 94.0),
    "1gbit": (50.0, 940.0),
    "10gbit": (30.0, 9_400.0),
    "25gbit": (20.0, 23_500.0),
    "100gbit": (10.0, 94_000.0),
    "pcie4": (5.0, 252_000.0),
    "nvlink": (3.0, 3_600_000.0),
}
BUCKET = 25 << 20  # bytes that DDP reduces at once
BACKWARD = 2 / 3  # of a step's computation: two products of matrices for each one of the forward pass
_COUNTS = (1, 2, 4, 8, 16)
_ROUNDS = 3  # sizes take turns, so that a slow moment of the machine meets them all
# bytes, beside a bucket's; little in between, where bursts that a slow link lets through would pass for it
_PROBES = (4 << 10, 1 << 20, 4 << 20)
_PROBE_S, _SAMPLE_S, _MOST_SAMPLES = 0.4, 0.02, 50


@dataclass(frozen=True)
class Plan:
    """What to forecast."""

    nproc: Annotated[Ints, Arg(unset="1,2,4,8,16")] = ()
    """Numbers of processes to forecast, over all machines; on this machine as far as there are cores or GPUs."""
    interconnect: str = "measured"
    """measured: between processes of this machine, or of --nnodes machines; or 100mbit, 1gbit, 10gbit, 25gbit, 100gbit,
    pcie4, nvlink, or latency and rate as 40us:5000mbit. With a named one each process has a machine like this one."""
    seconds: float = 3.0
    """How long to measure each micro-batch size."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("nproc",)})

    def __post_init__(self) -> None:
        check_fields(self)
        message = f"--nproc {','.join(map(str, self.nproc))} is not a growing list of numbers of processes"
        require(sorted({*self.nproc} - {0}) == list(self.nproc), message, "Give it as 1,2,4.")
        require(self.seconds > 0, f"--seconds {self.seconds} is not positive", "Give seconds, as 3.")
        config, execution = self.config, self.config.execution
        config.require_batch_for(max(self.nproc, default=1))
        plain = config.comm == CommConfig() and execution.strategy == "ddp" and not config.exact
        require(plain, "it forecasts plain DDP", "Leave out --exact, --strategy and --compress.")
        message = "--nnodes measures the link between machines, and an interconnect is named, too"
        require(self.stated is None or execution.nnodes == 1, message, "Leave one of the two out.")

    @property
    def stated(self) -> "Link | None":
        """A named interconnect; None where it is to be measured."""
        if self.interconnect == "measured":
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)us:(\d+(?:\.\d+)?)mbit", self.interconnect)
        if self.interconnect not in LINKS and (found is None or not float(found[2])):
            raise unknown("interconnect", self.interconnect, ("measured", *LINKS), "Or write it as 40us:5000mbit.")
        latency_us, mbit = (float(found[1]), float(found[2])) if found else LINKS[self.interconnect]
        return Link(self.interconnect, latency_us * 1e-6, mbit * 1e6 / 8)

    def shard(self, processes: int) -> int:
        """Images of the largest shard of a micro-batch."""
        micro = -(-self.config.batch_size // self.config.accumulate)
        return -(-micro // processes)


@dataclass(frozen=True)
class Link:
    """What connects the processes."""

    name: str
    alpha_s: float  # latency of one message, software included
    bandwidth: float  # bytes/s of one process, in each direction at once
    error: float = 0.0  # largest relative error of the fit, 0 where nothing was fitted

    def all_reduce_s(self, processes: int, nbytes: float) -> float:
        """Time of an all-reduce."""
        return 2 * (processes - 1) * (self.alpha_s + nbytes / processes / self.bandwidth)

    def with_software(self, loopback: "Link") -> "Link":
        """This link with the software's latency, and no faster than the software copies and adds."""
        return Link(self.name, self.alpha_s + loopback.alpha_s, min(self.bandwidth, loopback.bandwidth), loopback.error)


def fit_link(name: str, times: Sequence[tuple[int, float, float]]) -> Link:
    """The link that explains all-reduces (processes, bytes, seconds) best, by least relative squares.

    Neither number is negative.
    """
    import numpy as np

    x = np.array([(2 * (n - 1) / seconds, 2 * (n - 1) / n * nbytes / seconds) for n, nbytes, seconds in times])
    scale = x.max(axis=0)  # bytes beside message counts: solve in numbers of one size
    found = np.linalg.lstsq(x / scale, np.ones(len(times)), rcond=None)[0] / scale
    if min(found) < 0:  # the other one alone
        used = x[:, other := int(np.argmax(found * scale))]
        found = np.zeros(2)
        found[other] = used.sum() / (used @ used)
    link = Link(name, float(found[0]), 1 / float(found[1]) if found[1] else math.inf)
    return replace(link, error=max(abs(link.all_reduce_s(n, nbytes) / seconds - 1) for n, nbytes, seconds in times))


class Measured(NamedTuple):
    """What a group of processes found."""

    images: dict[int, tuple[float, float]]  # by images of a micro-batch: seconds for each, the loader's part of them
    gradients: int  # bytes of a step's
    blocking: list[int]  # bytes of each small all-reduce that the computation waits for
    probes: list[tuple[int, float, float]]  # (processes, bytes, seconds) of all-reduces alone
    others_cores: float = 0.0  # of this machine's, that other programs kept busy meanwhile


def forecast_step(n: int, step_s: float, loader: float, link: Link, found: Measured, hides: bool) -> dict[str, float]:
    """The step of N processes that each take `step_s` alone, of which `loader` is the loader's part.

    DDP reduces the gradients in buckets. With `hides` they travel beside the backward pass, but for the last one, which
    is complete when that ends. On a CPU gloo's threads take the cores that compute, so nothing is hidden.
    """
    full, rest = divmod(found.gradients - 1, BUCKET)
    buckets = [link.all_reduce_s(n, nbytes) for nbytes in [*[BUCKET] * full, rest + 1]]
    small = sum(link.all_reduce_s(n, nbytes) for nbytes in found.blocking)
    compute = step_s * (1 - loader)
    hidden = min(sum(buckets[:-1]), compute * BACKWARD) if hides else 0.0
    parts = {"compute_s": compute, "loader_s": step_s * loader, "exposed_s": sum(buckets) - hidden + small}
    return {"processes": n, **parts, "step_s": sum(parts.values()), "all_reduce_s": sum(buckets) + small}


def main(args: list[str]) -> int:
    """Forecast the step on N processes."""
    about = "Measure the recipe `{}` briefly and forecast its step on N processes; --out names a file or folder."
    plan: Plan = planned("forecast", lambda config: Plan(config=config), args, about)
    report = forecast(plan, log=print_error)
    if report is None:
        print("took part; machine 0 has the forecast")
        return 0
    print_report(report)
    if out := plan.config.execution.out:
        path = Path(out if out.endswith(".json") else f"{out}/forecast.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, report)
        print(f"written to {path}")
    return 0


def forecast(plan: Plan, log: Log) -> dict[str, Any] | None:
    """Measure and forecast; None on machines other than the first, which only take part.

    Raises UserError for what can't be measured here, and WorkerFailed where a measurement fails.
    """
    from lockstep.distributed.devices import devices
    from lockstep.distributed.proc import cores
    from lockstep.training.run_folder import check

    refuse_launched("forecast", "Run it without torchrun or mpirun; on each of several machines, with --nnodes.")
    check(plan.config)
    execution, available = plan.config.execution, devices(plan.config.execution)
    gpus, far = (0 if available[0].type == "cpu" else len(available)), execution.nnodes > 1
    here = plan.stated is None and not far  # all processes are on this machine
    room = (gpus or cores() // (execution.threads or 1)) if here else plan.shard(1)
    counts = [n for n in plan.nproc or _COUNTS if n <= min(room, plan.shard(1))]
    message = f"--nproc {max(plan.nproc or _COUNTS)}, and this machine has room for {room}"
    require(len(counts) >= max(2, len(plan.nproc)), message, "Name an --interconnect: each then has a machine.")
    together = {n: n if here else 1 for n in sorted({1, *counts})}  # processes of this machine that are measured
    found: dict[int, Measured] = {}
    for n in dict.fromkeys(together.values()):
        sizes = [plan.shard(count) for count, own in together.items() if own == n]
        found[n] = _measure(plan, sizes, n, n > 1 or far, log)
    if execution.node_rank > 0:
        return None
    probes = [probe for each in found.values() for probe in each.probes]
    if not probes and not gpus:  # what the software costs, between two processes here
        probes = _measure(plan, [plan.shard(2)], 2, True, log).probes
    link = fit_link("measured", probes) if probes else Link("measured", 0.0, math.inf)
    link = plan.stated.with_software(link) if plan.stated else link
    steps = []
    for n, own in together.items():
        image_s, loader = found[own].images[plan.shard(n)]
        step_s = image_s * plan.shard(n) * plan.config.accumulate
        steps.append(forecast_step(n, step_s, loader, link, found[own], hides=gpus > 0))
    mbit = None if link.bandwidth == math.inf else link.bandwidth * 8 / 1e6
    return {
        "config": plan.config.to_dict(),
        "cores": cores(),
        "gpus": gpus,
        "link": {"name": link.name, "alpha_s": link.alpha_s, "bandwidth_mbit": mbit, "error": link.error},
        "measured": {n: each._asdict() for n, each in found.items()},
        "rows": [row_of(each, steps[0], plan.config.batch_size) for each in steps if each["processes"] in counts],
    }


def _measure(plan: Plan, sizes: list[int], together: int, link: bool, log: Log) -> Measured:
    """Measure with so many processes of this machine at once: one alone would have its memory for itself."""
    from lockstep.distributed.proc import cores

    threads = plan.config.execution.threads or max(1, cores() // together)
    log(f"measuring {together} process(es) of {threads} thread(s), {', '.join(map(str, sizes))} images each")
    config = plan.config.with_execution(nproc=1, nnodes=1, node_rank=0)
    batches = [size * config.accumulate for size in sizes]
    configs = [replace(config, batch_size=size, samples=config.samples.for_batch(size)) for size in batches]
    execution = replace(plan.config.execution, nproc=together, threads=threads)
    found, others = on_ranks(measure, configs, plan.seconds, link, execution=execution)
    measured: Measured = found._replace(others_cores=others)
    return measured


def measure(world: "World", configs: Sequence[Config], seconds: float, link: bool) -> Measured:
    """Measure for so many seconds for each size; all ranks call it together and return the same.

    `configs` are one process's part for each size, as a run of its own. `link`: measure the all-reduce, too.
    """
    from lockstep.distributed.world import World
    from lockstep.parallel.batchnorm import batch_norms
    from lockstep.training.assemble import assemble, load_data, train_loader

    config, alone = configs[0], World.single(world.device)
    load_data(config, world)  # one process of a machine downloads what is missing
    run = assemble(config, alone)
    loaders = {each.batch_size // each.accumulate: train_loader(each, run.train.images, alone) for each in configs}
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in loaders}
    for _ in range(_ROUNDS):
        for size, loader in loaders.items():
            loader.read = run.train.read  # they share one set of workers
            run.train = loader
            world.barrier()
            found[size].append(speed(world, run, seconds / _ROUNDS, config.execution.workers))
    gradients = sum(p.numel() * p.element_size() for p in run.model.parameters() if p.requires_grad)
    # sums of the batch statistics, forward and backward, of every synchronised layer and micro-batch
    layers = batch_norms(run.model) if config.statistics(2) == "global" else []
    blocking = [2 * layer.num_features * 4 for layer in layers for _ in range(2 * config.accumulate)]
    medians = {size: tuple(map(statistics.median, zip(*each, strict=True))) for size, each in found.items()}
    return Measured(medians, gradients, blocking, probe(world, min(gradients, BUCKET)) if link else [])


def probe(world: "World", bucket: int) -> list[tuple[int, float, float]]:
    """All-reduces alone, one at a time: (processes, bytes, seconds) of each size, medians."""
    import torch
    import torch.distributed as dist

    found = []
    for nbytes in sorted({*_PROBES, bucket}):
        tensor = torch.zeros(nbytes // 4, device=world.device)

        def reduce(times: int, tensor: torch.Tensor = tensor) -> None:
            for _ in range(times):
                dist.all_reduce(tensor)

        timed(world, partial(reduce, 1))  # connections and buffers
        first, _ = timed(world, partial(reduce, 1))  # the same on all ranks, as what follows from it
        at_once = max(1, int(_SAMPLE_S / first))  # so that leaving the barrier together matters little
        samples = min(_MOST_SAMPLES, max(1, int(_PROBE_S / (first * at_once))))
        times = [timed(world, partial(reduce, at_once))[0] / at_once for _ in range(samples)]
        found.append((world.size, float(nbytes), statistics.median(times)))
    return found


def row_of(step: dict[str, float], one: dict[str, float], batch_size: int) -> dict[str, Any]:
    """All of one N: the step, its parts, and what they come to beside the step of one process."""
    speedup = one["step_s"] / step["step_s"]
    doubt = beyond(speedup, step["processes"])
    parts = {"compute": step["compute_s"], "loader": step["loader_s"], "all-reduce": step["exposed_s"]}
    return step | {
        "images_per_s": batch_size / step["step_s"],
        "speedup": None if doubt else speedup,
        "efficiency": None if doubt else speedup / step["processes"],
        "note": doubt,
        "bottleneck": max(parts, key=lambda name: parts[name]),
    }


def print_report(report: dict[str, Any]) -> None:
    """Print the table, what was measured, and where scaling stops."""
    rows, link = report["rows"], report["link"]

    def ms(title: str, key: str) -> Column:
        return Column(title, [f"{row[key] * 1e3:.1f}" for row in rows])

    columns = [
        Column("N", [str(row["processes"]) for row in rows]),
        ms("step ms", "step_s"),
        Column("images/s", [f"{row['images_per_s']:,.0f}" for row in rows]),
        Column("speed-up", ["-" if row["note"] else f"{row['speedup']:.2f}" for row in rows]),
        Column("efficiency", ["-" if row["note"] else f"{row['efficiency']:.0%}" for row in rows]),
        ms("compute ms", "compute_s"),
        ms("loader ms", "loader_s"),
        ms("all-reduce ms", "all_reduce_s"),
        ms("not hidden ms", "exposed_s"),
        Column("bottleneck", [row["bottleneck"] for row in rows], left=True),
    ]
    rate = "no limit seen" if link["bandwidth_mbit"] is None else f"{link['bandwidth_mbit']:,.0f} Mbit/s"
    fit = f"latency {link['alpha_s'] * 1e6:.0f} us, {rate}, fitted within {link['error']:.0%}"
    note = busy(max(found["others_cores"] for found in report["measured"].values()))
    half = [row["processes"] for row in rows if (row["efficiency"] or 1) < 0.5]
    end = f"efficiency is below 50 % from N = {half[0]} on" if half else "efficiency stays above 50 %"
    fastest, last = min(rows, key=lambda row: float(row["step_s"])), rows[-1]
    lines = [
        f"interconnect {link['name']}: {fit}",
        *(f"N = {row['processes']}: {row['note']}" for row in rows if row["note"]),
        *([note] if note else []),
        f"At N = {last['processes']} the bottleneck is {last['bottleneck']}; {end}; the step is shortest with "
        f"N = {fastest['processes']}.",
    ]
    show(columns, lines)
