"""`lockstep verify`: the first steps of a run on several numbers of processes, compared, and why they differ."""

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.commands.verify import agreement, diagnose
from lockstep.commands.verify.causes import Cause
from lockstep.commands.verify.diagnose import Comparison, Off
from lockstep.commands.verify.plan import Plan, check
from lockstep.commands.verify.record import trace_all
from lockstep.commands.verify.switches import FLOAT64, adapted
from lockstep.commands.verify.trace import Job, Trace, read
from lockstep.errors import UserError
from lockstep.processes.devices import device_type
from lockstep.processes.launcher import launch
from lockstep.processes.proc import cores


@dataclass(frozen=True)
class Report:
    """What verify found."""

    plan: Plan
    device: str
    threads: int
    per_step: float
    base: Trace
    comparisons: list[Comparison]
    causes: Mapping[int, list[Cause]]  # by number of processes

    @property
    def holds(self) -> bool:
        """True where the mode's claim holds: the same bits in exact mode, the same but for rounding in plain mode."""
        return all(self.harmless(cause) for causes in self.causes.values() for cause in causes)

    def harmless(self, cause: Cause) -> bool:
        """True for what the mode does not rule out."""
        return not self.plan.config.exact and cause.suspects == (FLOAT64,)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the config, each row of each comparison, the causes."""
        base = self.base
        return {
            "holds": self.holds,
            "config": self.plan.config_for(base.processes, self.threads).to_dict(),
            "steps": len(base.loss),
            "device": self.device,
            "threads": self.threads,
            "tolerance_per_step": self.per_step,
            "base": _result(base),
            "compared": [_result(c.other) | {"rows": [asdict(row) for row in c.rows]} for c in self.comparisons],
            "causes": [
                {"processes": n, **asdict(cause), "harmless": self.harmless(cause)}
                for n, causes in self.causes.items()
                for cause in causes
            ],
        }


def _result(trace: Trace) -> dict[str, Any]:
    return {"processes": trace.processes, "weights_sha256": trace.weights_sha256, "evaluation": trace.metrics}


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become strings."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


Start = Callable[..., list[Any]]  # launcher.launch, or what stands in for it


def verify(plan: Plan, start: Start | None = None, log: Callable[[str], None] = lambda _: None) -> Report:
    """Trace the run on each number of processes, compare, and diagnose what does not hold.

    Raises:
        UserError: for what can't be run here.
        WorkerFailed: where a run itself fails.
    """
    check(plan)
    with _folder(plan.config.execution.out) as folder:
        runs = _Runs(plan, folder, start or launch, log)
        traces = [runs.main(n) for n in plan.nproc]
        base = traces[0]
        if bad := [step for step, loss in enumerate(base.loss, 1) if not math.isfinite(loss)]:
            raise UserError(
                f"the loss becomes non-finite at step {bad[0]} with --nproc {base.processes}: nothing to compare",
                "Lower --lr, add --warmup-epochs or --clip-norm, or use --precision fp32 or bf16.",
            )
        exact = plan.config.exact > 0
        per_step = 0.0 if exact else plan.tolerance or agreement.PER_STEP[plan.config.precision]
        comparisons = [diagnose.Comparison(base, t, agreement.compare(base, t, per_step)) for t in traces[1:]]
        config = plan.config_for(base.processes, runs.threads)
        if any(not row.holds for c in comparisons for row in c.rows):
            log("something differs: switching suspects off one at a time")
        causes = diagnose.diagnose(comparisons, config, runs.again, runs.evaluate)
        for trace in traces[:1] if base.repeats else traces:
            if trace.repeats:
                causes.setdefault(trace.processes, []).append(diagnose.order_repeats(config))
        device = device_type(plan.config.execution)
        report = Report(plan, device, runs.threads, per_step, base, comparisons, causes)
        text = json.dumps(_plain(report.to_dict()), indent=2, allow_nan=False) + "\n"
        (folder / "verify.json").write_text(text, encoding="utf-8")
    if plan.json:
        _write(Path(plan.json), text)
    return report


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}", "Name another file with --json.") from error


@contextmanager
def _folder(out: str) -> Iterator[Path]:
    """Where traces are kept: `out`, or a folder for the time being."""
    if not out:
        with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
            yield Path(folder)
        return
    kept = Path(out).absolute()
    try:
        kept.mkdir(parents=True, exist_ok=True)
        empty = not any(kept.iterdir())
    except OSError as error:
        raise UserError(f"the folder {out} can't be made: {error.strerror}", "Name another with --out.") from error
    if not empty:
        raise UserError(f"{out} is not empty", "Name another folder with --out, or leave it out.")
    yield kept


class _Runs:
    """Starts traced runs, each number of processes in one launch for all its jobs."""

    def __init__(self, plan: Plan, folder: Path, start: Start, log: Callable[[str], None]) -> None:

        self.plan, self.folder, self.start, self.log = plan, folder, start, log
        # the same for every N, since kernels split their sums by them
        given = plan.config.execution.threads
        self.threads = given or (1 if plan.config.exact else max(1, cores() // max(plan.nproc)))

    def _job(self, processes: int, name: str, steps: int, what: str = "the run", **rest: Any) -> Job:

        config = self.plan.config_for(processes, self.threads)
        folder, title = self.folder / f"{processes}-{name}", f"N = {processes}, {what}"
        return Job(str(folder), config, steps, title, self.plan.patch, **rest)

    def _launch(self, jobs: Sequence[Job]) -> list[Trace]:

        self.start(trace_all, list(jobs), execution=jobs[0].config.execution)
        return [read(Path(job.folder)) for job in jobs]

    def main(self, processes: int) -> Trace:
        """The run itself."""
        self.log(f"N = {processes}: {self.plan.steps} steps")
        return self._launch([self._job(processes, "run", self.plan.steps)])[0]

    def again(
        self, processes: Sequence[int], offs: Sequence[Off], steps: int, even_for: Sequence[int]
    ) -> dict[tuple[int, Off], Trace]:
        """The first steps with each set of suspects switched off, on each number of processes."""

        out: dict[tuple[int, Off], Trace] = {}
        lr = tuple(map(tuple, read(self.folder / f"{self.plan.nproc[0]}-run").lr))
        for n in processes:
            self.log(f"N = {n}: {steps} steps, {'; '.join(map(diagnose.without, offs))}")
            jobs = []
            for off in offs:
                name = "without-" + ("+".join(off).replace(" ", "-") or "nothing")
                job = self._job(n, name, steps, diagnose.without(off), off=off, lr=lr, evaluate=False)
                jobs.append(replace(job, config=adapted(job.config, off, even_for)))
            out |= {(n, off): trace for off, trace in zip(offs, self._launch(jobs), strict=True)}
        return out

    def evaluate(self, processes: int) -> dict[str, float]:
        """The metrics of the first run's final weights on so many processes."""
        self.log(f"N = {processes}: evaluation of the weights of N = {self.plan.nproc[0]}")
        start = str(self.folder / f"{self.plan.nproc[0]}-run")
        return self._launch([self._job(processes, "evaluation", 0, start=start)])[0].metrics or {}
