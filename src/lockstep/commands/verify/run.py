"""`lockstep verify`: the first steps of a run on several numbers of processes, compared, and why they differ."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.commands.verify.agreement import compare
from lockstep.commands.verify.diagnose import diagnose
from lockstep.commands.verify.plan import Plan, check
from lockstep.commands.verify.record import trace_all
from lockstep.commands.verify.report import Report
from lockstep.commands.verify.switches import adapted
from lockstep.commands.verify.switching import Off, without
from lockstep.commands.verify.trace import Job, Trace, read
from lockstep.config import Config
from lockstep.errors import UserError
from lockstep.processes.files import write_json
from lockstep.processes.launcher import launch
from lockstep.processes.temporary import temporary_folder

Start = Callable[..., list[Any]]  # launcher.launch, or what stands in for it


def verify(plan: Plan, start: Start = launch, log: Callable[[str], None] = lambda _: None) -> Report:
    """Trace the run on each number of processes, compare, and diagnose what does not hold.

    Raises:
        UserError: for what can't be run here.
        WorkerFailed: where a run itself fails.
    """
    check(plan)
    with temporary_folder("verify-") as temporary:
        out = plan.config.execution.out
        runs = _Runs(plan, _claim(out) if out else Path(temporary), start, log)
        base, *others = [runs.trace(n) for n in plan.nproc]
        if bad := [step for step, loss in enumerate(base.loss, 1) if not math.isfinite(loss)]:
            raise UserError(
                f"the loss becomes non-finite at step {bad[0]} with --nproc {base.processes}: nothing to compare",
                "Lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32 or bf16.",
            )
        comparisons = [compare(base, other, plan.per_step) for other in others]
        if not all(comparison.holds for comparison in comparisons):
            log("something differs: switching suspects off one at a time")
        elif not plan.config.exact and not all(comparison.equal for comparison in comparisons):
            log("within tolerance: is it rounding? The same in float64")
        config = plan.config_for(base.processes)
        report = Report(plan, base, comparisons, diagnose(comparisons, config, runs.again, runs.evaluate, plan.float64))
        for path in (runs.folder / "verify.json", *([Path(plan.json)] if plan.json else [])):
            write_json(path, report.to_dict())
    return report


def _claim(out: str) -> Path:
    """The folder in which traces are kept."""
    folder = Path(out).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(f"the folder {out} can't be made: {error.strerror}", "Name another with --out.") from error
    if not empty:
        raise UserError(f"{out} is not empty", "Name another folder with --out, or leave it out.")
    return folder


class _Runs:
    """Starts traced runs, each number of processes in one launch for all its jobs."""

    def __init__(self, plan: Plan, folder: Path, start: Start, log: Callable[[str], None]) -> None:
        self.plan, self.folder, self.start, self.log = plan, folder, start, log
        self.base = folder / f"{plan.nproc[0]}-run"

    def trace(self, processes: int) -> Trace:
        """The run itself."""
        self.log(f"N = {processes}: {self.plan.steps} steps")
        return self._launch([self._job(self.plan.config_for(processes), "run", self.plan.steps)])[0]

    def again(
        self, processes: Sequence[int], offs: Sequence[Off], steps: int, even_for: Sequence[int]
    ) -> dict[tuple[int, Off], Trace]:
        """The first steps with each set of suspects switched off, on each number of processes."""
        out: dict[tuple[int, Off], Trace] = {}
        lr = tuple(map(tuple, read(self.base).lr))
        for n in processes:
            self.log(f"N = {n}: {steps} steps, {'; '.join(map(without, offs))}")
            jobs = []
            for off in offs:
                name = "without-" + ("+".join(off).replace(" ", "-") or "nothing")
                config = adapted(self.plan.config_for(n), off, even_for)
                jobs.append(self._job(config, name, steps, without(off), off=off, lr=lr, evaluate=False))
            out |= {(n, off): trace for off, trace in zip(offs, self._launch(jobs), strict=True)}
        return out

    def evaluate(self, processes: int) -> dict[str, float]:
        """The metrics of the first run's final weights on so many processes."""
        self.log(f"N = {processes}: evaluation of the weights of N = {self.plan.nproc[0]}")
        job = self._job(self.plan.config_for(processes), "evaluation", 0, start=str(self.base))
        return self._launch([job])[0].metrics or {}

    def _job(self, config: Config, name: str, steps: int, what: str = "the run", **rest: Any) -> Job:
        n = config.execution.nproc
        return Job(str(self.folder / f"{n}-{name}"), config, steps, f"N = {n}, {what}", self.plan.patch, **rest)

    def _launch(self, jobs: Sequence[Job]) -> list[Trace]:
        self.start(trace_all, list(jobs), execution=jobs[0].config.execution)
        return [read(Path(job.folder)) for job in jobs]
