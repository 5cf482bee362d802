"""`lockstep tune`: one axis after the other, each choice against the best so far, in turns."""

import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from lockstep.commands.shared.arguments import refuse_launched, train_arguments
from lockstep.commands.shared.measured import BUSY, interval, watch_others
from lockstep.commands.tune.measure import Speed, measure
from lockstep.commands.tune.plan import AXES, Choice, Plan
from lockstep.config import Config
from lockstep.data.arrays import ArraySet
from lockstep.errors import UserError
from lockstep.processes.devices import devices
from lockstep.processes.failures import WorkerFailed
from lockstep.processes.launcher import launch
from lockstep.processes.proc import cores
from lockstep.processes.world import World
from lockstep.training.assemble import load_data
from lockstep.training.folder import check

_AS_IT_IS = "as it is"
_LOOK_S = 0.5  # at who else computes, before and after each axis
_ALIKE, _ALIKE_BF16 = 1e-3, 5e-2  # relative distance of the first step's losses

Measure = Callable[[Config, float], Speed]


@dataclass(frozen=True)
class Row:
    """A choice beside the best of the axes before."""

    axis: str
    name: str
    images_per_s: float  # median
    ratio: tuple[float, float, float]  # over the best so far in the same round: median, and its interval
    changes: str  # beside the speed
    taken: bool
    same: bool  # as near to the first step's loss as its precision lets it be


@dataclass(frozen=True)
class Tuned:
    """What came of it."""

    rows: list[Row]
    notes: list[str]
    others_cores: float  # the most that others kept busy, as far as looked at
    exactly: str  # the command that changes rounding at most
    quickest: str  # the command; the same where the precision stays


def started(config: Config, seconds: float) -> Speed:
    """Measure on the processes of the config."""
    found: Speed = launch(measure, config, seconds, execution=config.execution)[0]
    return found


def tune(plan: Plan, log: Callable[[str], None], measure: Measure = started) -> Tuned:
    """Measure, choose, and say what to type.

    Raises:
        UserError: for a config that can't run.
    """
    refuse_launched("tune")
    check(plan.config)
    on_gpus = devices(plan.config.execution)[0].type != "cpu"
    best, rows, notes, others = plan.config, list[Row](), list[str](), [_others()]
    exactly = best
    for axis in (name for name in AXES if name in plan.axes):
        choices = AXES[axis].choices(best, cores(), on_gpus) if _applies(axis, best) else []
        choices = [choice for choice in choices if choice.config != best and _runs(choice, notes)]
        if not choices:
            notes.append(f"{axis}: there is nothing to choose here")
            continue
        found = _rounds(axis, [Choice(_AS_IT_IS, best), *choices], plan, measure, notes)
        here = _compared(axis, found)
        rows += here
        taken = {row.name for row in here if row.taken}
        best = next((choice.config for choice in choices if choice.name in taken), best)
        exactly = exactly if axis == "precision" else best
        others.append(_others())
    if max(others) > BUSY:
        log(f"others kept {max(others):.1f} of {cores()} cores busy: measure again when the machine is quiet")
    return Tuned(rows, notes, max(others), _command(exactly), _command(best))


def _applies(axis: str, config: Config) -> bool:
    """Workers read for sets that are no arrays in memory."""
    if axis != "workers" or config.execution.loader == "streaming":
        return True
    images, _ = load_data(config, World.single())
    return not isinstance(images, ArraySet)


def _runs(choice: Choice, notes: list[str]) -> bool:
    try:
        check(choice.config)
    except UserError as error:
        notes.append(f"{choice.name}: {error.message}")
        return False
    return True


def _others() -> float:
    """Cores that others keep busy while nothing of this command computes."""
    others = watch_others()
    time.sleep(_LOOK_S)
    return others()


def _rounds(
    axis: str, choices: Sequence[Choice], plan: Plan, measure: Measure, notes: list[str]
) -> dict[str, list[Speed]]:
    """Each choice's speed in each round; one that fails is told and left out."""
    found: dict[str, list[Speed]] = {choice.name: [] for choice in choices}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(axis, total=len(choices) * plan.rounds)
        for number in range(plan.rounds):
            for choice in choices if number % 2 == 0 else choices[::-1]:
                bar.update(task, description=f"{axis}: {choice.name}", advance=1)
                if choice.name not in found:
                    continue
                try:
                    found[choice.name].append(measure(choice.config, plan.seconds))
                except WorkerFailed as error:
                    if choice.name == _AS_IT_IS:
                        raise
                    notes.append(f"{axis}: {choice.name} can't be measured: {error}")
                    del found[choice.name]
    return found


def _compared(axis: str, found: Mapping[str, list[Speed]]) -> list[Row]:
    """The choices beside the first; the quickest of those that were quicker in all likelihood is taken."""
    base = found[_AS_IT_IS]
    rows = []
    for name, speeds in found.items():
        ratios = [mine.images_per_s / its.images_per_s for mine, its in zip(speeds, base, strict=True)]
        low, high = interval(ratios)
        alike = _ALIKE_BF16 if axis == "precision" else _ALIKE
        same = abs(speeds[0].loss - base[0].loss) <= alike * max(abs(base[0].loss), 1e-6)
        middle = statistics.median(speed.images_per_s for speed in speeds)
        changes = "" if name == _AS_IT_IS else AXES[axis].changes
        rows.append(Row(axis, name, middle, (statistics.median(ratios), low, high), changes, False, same))
    quicker = [row for row in rows[1:] if row.ratio[1] > 1 and row.same]
    winner = max(quicker, key=lambda row: row.ratio[0], default=rows[0])
    return [Row(**{**vars(row), "taken": row is winner}) for row in rows]


def _command(config: Config) -> str:
    return shlex.join(["lockstep", *train_arguments(config)])
