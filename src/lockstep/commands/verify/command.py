"""`lockstep verify`: the first steps of a run, several times, and nothing varied but what may change nothing.

The first run is train's own, on the first number of processes. Others have other numbers of processes, each with a
hash seed of its own: a set of two texts has the same order by half of them. One more has other CPU threads, hash seed,
loader workers and order of listed folders, all at once. What a run that differs varies is tried one by one. Where
something is beyond the tolerance the first run is taken again, with each step compared with itself. In plain mode
what differs is run in float64: rounding falls by eight orders of magnitude there.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.commands.shared.arguments import planned, print_error, refuse_launched
from lockstep.commands.verify.plan import Plan, Variant
from lockstep.config import Config
from lockstep.errors import EXIT_FAILURE, EXIT_USER_ERROR, UserError

if TYPE_CHECKING:
    from lockstep.commands.verify.report import Report
    from lockstep.commands.verify.trace import Job, Trace

_MORE_STEPS = 2  # that float64 takes after the first one that differs
_CHILD = "from lockstep.commands.verify.command import child; child()"

Start = Callable[["Job", Variant], None]


def main(args: list[str]) -> int:
    """Compare the first steps on several numbers of processes."""
    about = (
        "Run the first steps of the recipe `{}` on several numbers of processes, then with other threads, hash seeds, "
        "workers and orders of listed folders; compare ledger, images, losses, gradients, weights, buffers and "
        "evaluation, and say where they part. Exit code 0: the mode's claim holds (--exact: the same bits; else: the "
        "same but for rounding), 1: it does not."
    )
    plan: Plan = planned("verify", lambda config: Plan(config=config), args, about)
    from lockstep.commands.verify.report import print_report

    print_report(report := verify(plan, log=print_error))
    return 0 if report.holds else EXIT_FAILURE


def verify(plan: Plan, start: Start | None = None, log: Callable[[str], None] = lambda _: None) -> "Report":
    """Trace the runs, compare them with the first, and run what differs in float64.
    Raises UserError for what can't be run here, and WorkerFailed where a run itself fails.
    """
    from lockstep.commands.verify.compare import Comparison, compare, require_finite
    from lockstep.commands.verify.report import Report, Row, rounding
    from lockstep.distributed.files import temporary_folder

    _check(plan)
    with temporary_folder("verify-") as folder:
        base, others = plan.variants()

        def trace(variant: Variant, steps: int = plan.steps, wide: bool = False, closely: bool = False) -> "Trace":
            how = " in float64" * wide + ", each compared with itself" * closely
            log(f"{variant.beside(replace(base, nproc=0))}: {steps} steps{how}")
            return _trace(plan, Path(folder), variant, steps, wide, closely, start or _start)

        def once_more() -> None:
            report.again = trace(base, closely=True)
            report.itself = compare(first, report.again, plan.per_step).reason

        first = trace(base)
        require_finite(first, base.nproc)
        found = dict[Variant, Comparison]()
        for variant, simpler in others.items():
            alike = [each.holds for other, each in found.items() if other.nproc == variant.nproc]
            found[variant] = compare(first, trace(variant), plan.per_step)
            if all(alike) and not found[variant].holds:
                found |= {each: compare(first, trace(each), plan.per_step) for each in simpler}
        holds = all(each.holds for each in found.values())
        report = Report(plan, base, first, [Row(variant, comparison) for variant, comparison in found.items()])
        differing = [row for row in report.rows if not (row.comparison.equal and row.comparison.holds)]
        if not holds:  # before others that may leave something behind
            once_more()
        if differing and not plan.config.exact and not report.itself:
            log("something differs: is it rounding? The same in float64")
            places = [row.comparison.first_step for row in differing]
            steps = min(max(places) + _MORE_STEPS, plan.steps) if all(places) else plan.steps
            rounding(report, differing, lambda variant: trace(variant, steps, wide=True))
        if report.differing() and holds:
            once_more()
    return report


def _trace(plan: Plan, folder: Path, variant: Variant, steps: int, wide: bool, closely: bool, start: Start) -> "Trace":
    from lockstep.commands.verify.trace import Job, read

    config = plan.config.with_execution(nproc=variant.nproc, threads=variant.threads, workers=variant.workers)
    name = "-".join(str(int(value)) for value in astuple(variant))
    place = folder / f"run-{name}{'-float64' * wide}{'-closely' * closely}"
    job = Job(str(place), config, steps, plan.patch, wide, variant.reordered, closely)
    start(job, variant)
    return read(Path(job.folder))


def _start(job: "Job", variant: Variant) -> None:
    """Run a job; in a Python of its own where its texts are to hash otherwise, and where this one would be its process:
    a class that counts its instances, say, would go on counting."""
    from lockstep.commands.verify.trace import trace_run
    from lockstep.distributed.failures import WorkerFailed
    from lockstep.distributed.launcher import launch

    if variant.nproc > 1 and os.environ.get("PYTHONHASHSEED", "random") == str(variant.hash_seed):
        launch(trace_run, job, execution=job.config.execution)
        return
    environ = os.environ | {"PYTHONHASHSEED": str(variant.hash_seed)}
    plain = json.dumps(vars(job) | {"config": job.config.to_dict()})
    ended = subprocess.run([sys.executable, "-c", _CHILD], input=plain, env=environ, text=True, stderr=subprocess.PIPE)
    if ended.returncode:
        said = ended.stderr.strip() or f"it ended with exit code {ended.returncode}"
        rank, message = re.fullmatch(r"(?:rank (\d+): )?(.*)", said, re.DOTALL).groups()  # type: ignore[union-attr]
        raise WorkerFailed(int(rank or 0), message, ended.returncode)


def child() -> None:
    """What a Python of its own does: the job on standard input."""
    from lockstep.commands.verify.trace import Job, trace_run
    from lockstep.distributed.failures import WorkerFailed
    from lockstep.distributed.launcher import launch

    plain = json.load(sys.stdin)
    job = Job(**plain | {"config": Config.from_dict(plain["config"])})
    try:
        launch(trace_run, job, execution=job.config.execution)
    except (UserError, WorkerFailed) as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, WorkerFailed) else EXIT_USER_ERROR)


def _check(plan: Plan) -> None:
    """What can be known to be wrong before any process starts."""
    from lockstep.config.objects import load_object
    from lockstep.distributed.devices import process_count
    from lockstep.training.run_folder import check

    refuse_launched("verify")
    check(plan.config)
    for n in plan.nproc:
        process_count(plan.config.with_execution(nproc=n).execution)
    if plan.patch and not callable(load_object(plan.patch, "patch")):
        raise UserError(f"--patch {plan.patch} is no function", "It is called with (run, world, config).")
