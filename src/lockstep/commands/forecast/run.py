"""`lockstep forecast`: measure what one process does, and say what N would."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.commands.forecast import model
from lockstep.commands.forecast.measure import Job, Measured, measure
from lockstep.commands.forecast.model import Curve, Forecast, Limits, Link, Reductions, Timeline
from lockstep.commands.forecast.plan import MEASURED, Layout, Plan, layout, own_cost
from lockstep.commands.shared.arguments import refuse_launched
from lockstep.errors import UserError
from lockstep.processes.devices import devices
from lockstep.processes.launcher import launch
from lockstep.processes.proc import cores

_SIZES = 6  # micro-batch sizes measured in a group, at most; the others lie between them
_LOOK = 1024  # processes up to which the end of scaling is looked for
_FEW = 2  # processes that measure a link where nothing else needs so many at once

Group = tuple[int, int, bool]  # threads of a process, processes measured at once, as one of several


@dataclass(frozen=True)
class Report:
    """What forecast found."""

    plan: Plan
    device: str
    cores: int
    link: Link
    measured: dict[Group, Measured]
    sends: Reductions
    layouts: list[Layout]
    forecasts: list[Forecast]  # for N = 1, then for --nproc
    limits: Limits

    @property
    def shown(self) -> list[tuple[Layout, Forecast]]:
        """The rows that were asked for."""
        rows = zip(self.layouts, self.forecasts, strict=True)
        return [(where, p) for where, p in rows if p.processes in self.plan.nproc]

    def speedup(self, forecast: Forecast) -> float:
        """Over one process."""
        return self.forecasts[0].step_s / forecast.step_s

    def loader_rate(self, where: Layout) -> float:
        """Images/s that the loaders of all processes can deliver."""
        rates = self.measured[where.group].loader
        piece, _ = self.plan.pieces(where.processes)
        return where.processes * rates[min(rates, key=lambda size: abs(size - piece))] / where.crowding

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what was measured, and each row."""
        link = asdict(self.link) | {"bandwidth_mbit": self.link.bandwidth * 8 / 1e6}
        return {
            "config": self.plan.config.to_dict(),
            "device": self.device,
            "cores": self.cores,
            "link": {k: None if v == math.inf else v for k, v in link.items()},
            "bytes_per_step": sum(self.sends.buckets),
            "buckets": list(self.sends.buckets),
            "measured": [
                {
                    "threads": threads,
                    "at_once": together,
                    "reduces": reduces,
                    "fixed_s": Curve(found.steps).line[0],
                    "s_per_image": Curve(found.steps).line[1],
                    "steps": {str(size): asdict(step) for size, step in found.steps.items()},
                    "loader_images_per_s": {str(size): rate for size, rate in found.loader.items()},
                    "all_reduces": [list(probe) for probe in found.probes],
                }
                for (threads, together, reduces), found in self.measured.items()
            ],
            "rows": [
                asdict(p)
                | {
                    "step_s": p.step_s,
                    "images_per_s": self.plan.config.batch_size / p.step_s,
                    "speedup": self.speedup(p),
                    "efficiency": self.speedup(p) / p.processes,
                    "hidden": p.hidden,
                    "bottleneck": p.bottleneck,
                    "threads": where.threads,
                    "loader_images_per_s": self.loader_rate(where),
                }
                for where, p in self.shown
            ],
            "limits": asdict(self.limits),
        }


def forecast(plan: Plan, log: Callable[[str], None] = lambda _: None) -> Report | None:
    """Measure and forecast; None on machines other than the first, which only take part.

    Raises:
        UserError: for what can't be measured here.
        WorkerFailed: where a measurement itself fails.
    """
    gpus = check(plan)
    here = cores()
    layouts = [layout(plan, n, here, gpus) for n in sorted({1, *plan.nproc})]
    execution = plan.config.execution
    measured: dict[Group, Measured] = {}
    for group, members in _groups(layouts).items():
        threads, together, reduces = group
        far = reduces and execution.nnodes > 1
        if execution.node_rank > 0 and not far:
            continue  # one process alone is the first machine's business
        sizes = _few(sorted({plan.pieces(where.processes)[0] for where in members}, reverse=True))
        log(f"measuring {together} process(es) of {threads} thread(s), {', '.join(map(str, sizes))} images each")
        several = together > 1 or far
        measured[group] = _launch(plan, sizes, group, link=several and (far or plan.stated is None or not gpus))
    if execution.node_rank > 0:
        return None
    link = _link(plan, measured, gpus, here, log)
    return _report(plan, layouts, measured, link, gpus, here)


def check(plan: Plan) -> int:
    """What can be known to be wrong before anything starts; returns the number of GPUs, 0 for the CPU."""
    from lockstep.training.folder import check as check_names

    refuse_launched(
        "forecast", "Run it without torchrun or mpirun; for a link between machines on each of them with --nnodes."
    )
    check_names(plan.config)
    available = devices(plan.config.execution)
    gpus = 0 if available[0].type == "cpu" else len(available)
    if gpus == 1 and plan.stated is None and plan.config.execution.nnodes == 1 and max(plan.nproc) > 1:
        raise UserError(
            "one GPU has nobody to exchange gradients with, so no interconnect can be measured",
            "Name one, as --interconnect 10gbit or nvlink, or give --latency-us and --bandwidth-mbit.",
        )
    out = plan.config.execution.out
    if out and not Path(out).absolute().parent.is_dir():
        raise UserError(f"--out {out}: its folder does not exist", "Make it, or name another file.")
    return gpus


def _groups(layouts: list[Layout]) -> dict[Group, list[Layout]]:
    groups: dict[Group, list[Layout]] = {}
    for where in layouts:
        groups.setdefault(where.group, []).append(where)
    return groups


def _few(sizes: list[int]) -> list[int]:
    """At most `_SIZES` of them, evenly spread, with the first and the last; two at least, for a line."""
    if len(sizes) == 1 and sizes[0] > 1:
        return [sizes[0], sizes[0] // 2]
    if len(sizes) <= _SIZES:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / (_SIZES - 1))] for i in range(_SIZES)]


def _launch(plan: Plan, sizes: list[int], group: Group, link: bool) -> Measured:
    threads, together, reduces = group
    job = Job(tuple(plan.config_for(size) for size in sizes), reduces, plan.seconds, link)
    alone = {} if reduces else {"nnodes": 1, "node_rank": 0}
    found: Measured = launch(measure, job, execution=plan.execution_for(together, threads, **alone))[0]
    return found


def _link(plan: Plan, measured: dict[Group, Measured], gpus: int, here: int, log: Callable[[str], None]) -> Link:
    """The interconnect: fitted to what was measured, or stated, with the software's own cost where that is known."""
    probed = [found for found in measured.values() if found.probes]
    if not probed and not gpus:  # every process has a machine of its own: two share this one for a moment
        threads = max(1, here // _FEW)
        log(f"measuring the all-reduce of {_FEW} processes of {threads} thread(s) over the loopback")
        probed = [_launch(plan, [plan.pieces(_FEW)[0]], (threads, _FEW, True), link=True)]
    if not probed:
        assert plan.stated is not None
        return plan.stated
    times = [probe for found in probed for probe in found.probes]
    between = "between machines" if plan.config.execution.nnodes > 1 else "between processes of this machine"
    fitted = model.fit_link(f"{MEASURED} {between}", times, max(found.stolen_core_s for found in probed))
    return fitted if plan.stated is None else own_cost(plan.stated, fitted)


def _report(
    plan: Plan, layouts: list[Layout], measured: dict[Group, Measured], link: Link, gpus: int, here: int
) -> Report:
    largest = measured[layouts[-1].group]
    sends = Reductions(largest.buckets, largest.blocking)
    curves = {group: Curve(found.steps) for group, found in measured.items()}

    def row(where: Layout) -> Forecast:
        own: Timeline = curves[where.group].at(plan.pieces(where.processes)[0])
        return model.forecast(
            where.processes,
            own,
            link,
            sends,
            threads=where.threads,
            crowding=where.crowding,
            prefetched=measured[where.group].prefetched,
        )

    forecasts = [row(where) for where in layouts]
    last, most = layouts[-1].processes, plan.config.batch_size // plan.config.accumulate
    beyond = [layout(plan, n, here, gpus) for n in range(last + 1, min(most, _LOOK) + 1)]
    # where more processes leave each fewer threads, nothing was measured that says how fast those are
    further = [row(where) for where in beyond if where.group in measured and last > 1]
    found = model.limits([*forecasts, *further])
    return Report(plan, largest.device, here, link, measured, sends, layouts, forecasts, found)


def write(report: Report, out: str) -> Path:
    """Keep the report: `out` is a file that ends in .json, or a folder that gets forecast.json."""
    path = Path(out) if out.endswith(".json") else Path(out) / "forecast.json"
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}", "Name another place with --out.") from error
    return path
