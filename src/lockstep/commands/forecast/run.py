"""`lockstep forecast`: measure what one process does, and compute what N would."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lockstep.commands.forecast import model
from lockstep.commands.forecast.measure import Measured, measure
from lockstep.commands.forecast.model import Forecast, Link
from lockstep.commands.forecast.plan import MEASURED, Group, Layout, Plan, layout, own_cost
from lockstep.commands.forecast.report import Report
from lockstep.commands.shared.arguments import refuse_launched
from lockstep.commands.shared.measured import watch_others
from lockstep.errors import UserError
from lockstep.processes.devices import devices
from lockstep.processes.launcher import launch
from lockstep.processes.proc import cores

_SIZES = 6  # micro-batch sizes measured in a group, at most; the others lie between them
_LOOK = 1024  # processes up to which the end of scaling is looked for
_FEW = 2  # processes that measure a link where nothing else needs so many at once


def forecast(plan: Plan, log: Callable[[str], None] = lambda _: None) -> Report | None:
    """Measure and forecast; None on machines other than the first, which only take part.

    Raises:
        UserError: for what can't be measured here.
        WorkerFailed: where a measurement itself fails.
    """
    gpus, here, execution = check(plan), cores(), plan.config.execution
    layouts = [layout(plan, n, here, gpus) for n in sorted({1, *plan.nproc})]
    measured: dict[Group, Measured] = {}
    for group in dict.fromkeys(where.group for where in layouts):
        far = group.reduces and execution.nnodes > 1
        if execution.node_rank > 0 and not far:
            continue  # one process alone is the first machine's business
        sizes = _few({plan.piece(where.processes) for where in layouts if where.group == group})
        log(f"measuring {group.name}, {', '.join(map(str, sizes))} images each")
        several = group.together > 1 or far
        measured[group] = _launch(plan, sizes, group, link=several and (far or plan.stated is None or not gpus))
    if execution.node_rank > 0:
        return None
    link = _link(plan, measured, gpus, here, log)
    sends = measured[layouts[-1].group].sends

    def step(where: Layout) -> Forecast:
        found = measured[where.group]
        return model.forecast(
            where.processes,
            found.curve.at(plan.piece(where.processes)),
            link,
            sends,
            threads=where.group.threads,
            crowding=where.crowding,
            prefetched=found.prefetched,
        )

    steps = [step(where) for where in layouts]
    last, most = layouts[-1].processes, plan.config.batch_size // plan.config.accumulate
    beyond = [layout(plan, n, here, gpus) for n in range(last + 1, min(most, _LOOK) + 1)]
    # where more processes leave each fewer threads, nothing was measured that says how fast those are
    further = [step(where) for where in beyond if where.group in measured and last > 1]
    rows = [(where, each) for where, each in zip(layouts, steps, strict=True) if where.processes in plan.nproc]
    return Report(plan, here, link, measured, steps[0], rows, model.limits([*steps, *further]))


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


def _few(wanted: set[int]) -> list[int]:
    """At most `_SIZES` of them, evenly spread from the largest to the smallest; two at least, for a line."""
    sizes = sorted(wanted, reverse=True)
    if len(sizes) == 1 and sizes[0] > 1:
        return [sizes[0], sizes[0] // 2]
    if len(sizes) <= _SIZES:
        return sizes
    return [sizes[round(i * (len(sizes) - 1) / (_SIZES - 1))] for i in range(_SIZES)]


def _launch(plan: Plan, sizes: list[int], group: Group, link: bool) -> Measured:
    config = plan.config if group.reduces else plan.config.with_execution(nnodes=1, node_rank=0)
    execution = config.with_execution(nproc=group.together, threads=group.threads).execution
    configs = [plan.config_for(size) for size in sizes]
    others = watch_others()
    found: Measured = launch(measure, configs, group.reduces, plan.seconds, link, execution=execution)[0]
    return replace(found, others_cores=others())


def _link(plan: Plan, measured: dict[Group, Measured], gpus: int, here: int, log: Callable[[str], None]) -> Link:
    """The interconnect: fitted to what was measured, or stated, with the software's own cost where that is known."""
    probed = [found for found in measured.values() if found.probes]
    if not probed and not gpus:  # every process has a machine of its own: two share this one for a moment
        group = Group(max(1, here // _FEW), _FEW, reduces=True)
        log(f"measuring the all-reduce of {_FEW} processes of {group.threads} thread(s) over the loopback")
        probed = [_launch(plan, [plan.piece(_FEW)], group, link=True)]
    if not probed:
        assert plan.stated is not None
        return plan.stated
    times = [probe for found in probed for probe in found.probes]
    between = "between machines" if plan.config.execution.nnodes > 1 else "between processes of this machine"
    fitted = model.fit_link(f"{MEASURED} {between}", times, max(found.stolen_core_s for found in probed))
    return fitted if plan.stated is None else own_cost(plan.stated, fitted)
