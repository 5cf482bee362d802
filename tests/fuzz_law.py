"""A differential fuzzer of the law: `python -m tests.fuzz_law --seconds 120 --seed 1`.

It draws configurations and asks two ways that must agree: what `verify` says of several numbers of processes, and what
`train` leaves on each of them, in its `end` record and as the final weights' bytes; also where it is stopped and goes
on with another number of processes, and in exact mode with other threads and sharded weights. Texts hash otherwise on
each number of processes. Refusals are listed with
their sentences. Exit code 1: they disagree somewhere, or the law does not hold; each case comes with its command line.
A machine too slow for an answer is none.
"""

import argparse
import contextlib
import hashlib
import io
import math
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from lockstep.commands.shared.arguments import planned
from lockstep.commands.verify.command import verify
from lockstep.commands.verify.plan import Plan, Variant
from lockstep.commands.verify.report import Report
from lockstep.commands.verify.trace import Job, trace_run
from lockstep.config import Config
from lockstep.distributed.failures import WorkerFailed
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests import journals
from tests.fuzz_draws import Drawn, draw
from tests.fuzz_sets import write_pictures
from tests.pool import Pool

_REFUSED = re.compile(r"^lockstep\.errors\.UserError: (.*)$", re.MULTILINE)
_SLOW = "no answer in"
_SHARED_MEMORY = Path("/dev/shm")  # checkpoints wait for their disk
_SHOWN = 400  # characters of an error


@dataclass
class Tally:
    """What came of the configurations."""

    drawn: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)


class Refused(Exception):
    """A sentence that the user gets."""


class TooSlow(Exception):
    """This machine gave no answer in time."""


def fuzz(seconds: float, seed: int, configurations: int, say: Callable[[str], None] = print) -> Tally:
    """Try configurations until the time is up, or so many."""
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as scratch, Pool(timeout=300, hash_seeds=True) as pool:
        write_pictures(pictures := Path(scratch) / "pictures")
        while tally.drawn < configurations and time.monotonic() - began < seconds:
            number = tally.drawn
            tally.drawn += 1
            drawn = draw(random.Random(f"{seed} {number}"), pictures)
            try:
                kind, wrong = tried(drawn, pool)
            except Refused as refused:
                tally.refused[str(refused)] += 1
                continue
            except TooSlow:
                tally.kinds["without an answer in time"] += 1
                continue
            except Exception as error:
                kind, wrong = "crashed", [f"{type(error).__name__}: ...{str(error).strip()[-_SHOWN:]}"]
            tally.kinds[kind] += 1
            for what in wrong:
                text = f"seed {seed}, configuration {number}: {what}\n  {drawn.line('verify')}"
                tally.disagreements.append(text)
                say(text)
    return tally


def tried(drawn: Drawn, pool: Pool) -> tuple[str, list[str]]:
    """Whether it was exact or plain, and what does not fit together."""
    plan, report = _verified(drawn, pool)
    wrong = _of_verify(drawn, report)
    magnified = bool(wrong) and not drawn.exact and _holds_by_sgd(drawn, pool)
    if magnified:
        wrong = []
    ends = {}
    threads = plan.config.execution.threads or 1

    def config_for(processes: int) -> Config:
        return plan.config.with_execution(nproc=processes, threads=threads)

    for trace in (report.first, *(row.comparison.other for row in report.rows)):
        n = trace.processes
        with _asked():
            ends[n] = end = trained(pool, [(config_for(n), 0)])
        seen = {
            "weights_sha256": trace.weights_sha256,
            "ledger_sha256": trace.ledger[-1],
            "top1": (trace.metrics or {}).get("top1"),
            "loss": (trace.metrics or {}).get("loss"),
        }
        if different := [name for name, value in seen.items() if end[name] != value]:
            wrong.append(f"with N = {n}, train and verify's trace differ in {', '.join(different)}")
    kind = "exact" if drawn.exact else "plain, rounding magnified" if magnified else "plain"
    names = [name for name in ends[plan.nproc[0]] if drawn.exact or name == "ledger_sha256"]
    unlike = [name for name in names if len({str(end[name]) for end in ends.values()}) > 1]
    if unlike and report.holds:
        wrong.append(f"verify says that it holds, and train's {', '.join(unlike)} depend on N")
    if drawn.exact and not unlike and not report.holds:
        wrong.append("verify says that it does not hold, and train leaves the same on every N")
    first, last = plan.nproc[0], plan.nproc[-1]
    stop = drawn.stop if drawn.stop < len(report.first.loss) else 0
    threaded = config_for(first).with_execution(threads=drawn.threads)
    for wanted, name, parts in (
        (stop, "resumed", [(config_for(first), stop), (config_for(last), 0)]),
        (drawn.threads, "threads", [(threaded, 0)]),
    ):
        if wanted:
            kind += f", {name}"
            with _asked():
                end = trained(pool, parts)
            own = ["losses"] * (name == "resumed")  # a stop has a record of its own
            if other := [key for key in names if key not in (*unlike, *own) and end[key] != ends[last][key]]:
                wrong.append(f"{name} ({wanted}): {', '.join(other)} differ from the straight run's")
    return kind, wrong


def _verified(drawn: Drawn, pool: Pool) -> tuple[Plan, Report]:
    with _asked(), contextlib.redirect_stderr(io.StringIO()):
        args = [drawn.recipe, *drawn.flags, "--nproc", ",".join(map(str, drawn.nproc)), "--steps", "99", "--no-vary"]
        plan: Plan = planned("verify", lambda config: Plan(config=config), args, "{}")
        if not plan.config.execution.threads:
            plan = replace(plan, config=plan.config.with_execution(threads=1))

    def start(job: Job, _: Variant) -> None:
        pool.start(trace_run, job, execution=job.config.execution)

    with _asked():
        return plan, verify(plan, start=start)


def _holds_by_sgd(drawn: Drawn, pool: Pool) -> bool:
    """Whether nothing is wrong with the same configuration under SGD, which adds gradients as they are.

    Adam, Adadelta and Muon divide a gradient by its own size. Where it is rounding alone, as before a batch norm over
    two values, it becomes as large as any other, and the next steps' differences are above any bound in float64 too.
    """
    if "--optimizer" in drawn.flags:
        at = drawn.flags.index("--optimizer")
        if drawn.flags[at + 1] == "sgd":
            return False
        flags = (*drawn.flags[:at], *drawn.flags[at + 2 :])
    else:
        flags = drawn.flags
    steady = replace(drawn, flags=(*flags, "--optimizer", "sgd"))
    return not _of_verify(steady, _verified(steady, pool)[1])


def _of_verify(drawn: Drawn, report: Report) -> list[str]:
    """What verify found that is not by design."""
    found = []
    for row in report.differing():
        local = drawn.local and not drawn.exact  # batch statistics of each rank's own samples
        # fp16: a share's sum stays below the largest number where the whole batch's does not
        overflow = "fp16" in drawn.flags and not math.isfinite(row.comparison.largest)
        if not (local or overflow):
            first = "; ".join(f"{each.quantity} {each.detail}" for each in row.comparison.rows if not each.holds)
            found.append(f"verify, N = {row.variant.nproc}: {row.reason} [{first}]")
    return found


@contextlib.contextmanager
def _asked() -> Iterator[None]:
    """Tell refusals and slowness from failures."""
    try:
        yield
    except UserError as error:
        raise Refused(_generic(str(error))) from error
    except WorkerFailed as failed:
        if found := _REFUSED.findall(str(failed)):
            raise Refused(_generic(found[-1])) from failed
        if _SLOW in str(failed):
            raise TooSlow from failed
        raise


def _generic(sentence: str) -> str:
    """The sentence without its numbers, so that one refusal is counted once."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", sentence.splitlines()[0])


def trained(pool: Pool, parts: list[tuple[Config, int]]) -> dict[str, Any]:
    """What `train` leaves: each part goes on in the same folder, and stops after so many steps (0: at its end)."""
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        for config, stop in parts:
            pool.start(_train, config, folder, stop, execution=config.execution)
        records = journals.read(Path(folder, "journal.jsonl"))
        end, losses = records[-1], [repr(each["loss"]) for each in records if each["kind"] == "step"]
        file = hashlib.sha256(Path(folder, "weights", "final.safetensors").read_bytes()).hexdigest()
        found = {name: end[name] for name in ("weights_sha256", "ledger_sha256", "top1", "loss")}
        return found | {"file": file, "losses": losses}


def _train(world: World, config: Config, folder: str, stop: int) -> None:
    """On each rank."""
    from lockstep.training.control import Agreement, Control
    from lockstep.training.loop import train

    agree = Control.agree

    def stopping(self: Control, steps: int, failed: bool = False, now: bool = False) -> Agreement:
        asked = agree(self, steps, failed, now)
        return Agreement(signal.SIGUSR1, True, asked.failed) if steps == stop else asked

    with mock.patch.object(Control, "agree", stopping), contextlib.redirect_stdout(io.StringIO()):
        train(config, world, Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--configurations", type=int, default=1 << 30)
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    tally = fuzz(given.seconds, given.seed, given.configurations, lambda text: print(text, flush=True))
    print(f"{tally.drawn} configurations: {dict(tally.kinds)}, {tally.refused.total()} refused")
    for sentence, count in tally.refused.most_common():
        print(f"  {count} x {sentence}")
    print(f"{len(tally.disagreements)} disagreement(s)")
    return bool(tally.disagreements)


if __name__ == "__main__":
    sys.exit(main())
