"""`lockstep tune`: the quickest way to train a recipe here, one axis after the other, each choice against the best."""

import shlex
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.commands import measuring
from lockstep.commands.measuring import Figure, Log, Row
from lockstep.commands.shared.arguments import planned, print_error, refuse_launched, train_arguments
from lockstep.commands.shared.grid import Column
from lockstep.config import Config, Names
from lockstep.config.fields import check_fields, require, with_values
from lockstep.errors import UserError, unknown

if TYPE_CHECKING:
    from lockstep.distributed.world import World

# axis -> what its choices change beside the speed; in the order in which they are measured
AXES = {
    "split": "rounding",
    "workers": "nothing",
    "channels_last": "rounding",
    "compile": "rounding",
    "precision": "products of 8 bits",
}


@dataclass(frozen=True)
class Plan:
    """What to tune."""

    axes: Names = tuple(AXES)
    """What to choose: split (processes x threads), workers (where images are read from files), channels_last, compile
    (where there is a C++ compiler), precision."""
    rounds: int = 3
    """Rounds of each axis: each measures every choice once, every other round backwards."""
    seconds: float = 1.0
    """How long to measure a choice in a round, its start not counted."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("out",)})

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.axes:
            if name not in AXES:
                raise unknown("axis", name, AXES)
        require(self.rounds >= 2, f"--rounds {self.rounds} gives no interval", "Use 2 or more.")
        require(self.seconds > 0, f"--seconds {self.seconds:g} is not positive", "Give seconds, as 1.")
        measuring.require_one_machine("tune", self.config)


@dataclass
class Choice(Row):
    """A choice of an axis, beside the best of the axes before."""

    axis: str
    ratio: Figure | None = None  # its speed over the best so far, of the same round; None for that one itself
    taken: bool = False


def main(args: list[str]) -> int:
    """Find the quickest way to train a recipe on this machine."""
    about = (
        "Measure by which split over processes and threads, workers, memory layout, compilation and precision the "
        "recipe `{}` trains fastest here, in a minute or two, and print the command to type."
    )
    plan: Plan = planned("tune", lambda config: Plan(config=config), args, about)
    print_tuned(*tune(plan, print_error, measure_on_ranks))
    return 0


def choices(axis: str, config: Config, cores: int, on_gpus: bool) -> dict[str, dict[str, Any]]:
    """By name, the fields that a choice sets; none where there is nothing to choose."""
    # torch.compile writes C++ for a CPU, and C for what starts a GPU's kernels
    compiler = shutil.which("g++") or shutil.which("clang++") or (on_gpus and shutil.which("cc"))
    if axis == "split" and not on_gpus:
        counts = sorted({1, *(n for n in (2, 4, 8, 16) if n < cores), cores})
        return {f"{n} x {max(1, cores // n)} threads": {"nproc": n, "threads": max(1, cores // n)} for n in counts}
    if axis == "workers" and _reads_files(config):
        return {f"{n} workers": {"workers": n} for n in (0, 1, 2, 4, 8) if n <= max(2, cores)}
    if axis == "precision":
        return {"bf16": {"precision": "bf16"}}
    return {axis: {axis: True}} if axis == "channels_last" or (axis == "compile" and compiler) else {}


def _reads_files(config: Config) -> bool:
    """False for a set that is an array in memory, which no worker reads."""
    from lockstep.data.image_sets import ArraySet
    from lockstep.distributed.world import World
    from lockstep.training.assemble import load_data

    return config.execution.loader == "streaming" or not isinstance(load_data(config, World.single())[0], ArraySet)


def tune(
    plan: Plan, log: Log, measure: Callable[[Row, float], dict[str, float]]
) -> tuple[list[Choice], list[str], str, str]:
    """Measure and choose. Raises UserError for a config that can't run.

    Returns:
        The rows; notes; the command that changes rounding at most; the quickest, the same where the precision stays.
    """
    from lockstep.distributed.devices import devices
    from lockstep.distributed.proc import cores
    from lockstep.training.run_folder import check

    refuse_launched("tune")
    check(plan.config)
    on_gpus = devices(plan.config.execution)[0].type != "cpu"
    best, exact, rows, notes = plan.config, plan.config, list[Choice](), list[str]()

    for axis in (name for name in AXES if name in plan.axes):
        here = [Choice("as it is", best, "", {}, axis)]
        for name, fields in choices(axis, best, cores(), on_gpus).items():
            row = Choice(name, best, "", {}, axis)
            try:
                row.config = with_values(best, fields)
                check(row.config)
            except UserError as error:
                row.failed = error.message
            here += [row] if row.failed or row.config != best else []
        if any(not row.failed for row in here[1:]):
            measuring.run_rounds(here, plan.rounds, lambda row, _: measure(row, plan.seconds), log)
            require(not here[0].failed, f"{axis}: {here[0].failed}", "See what `lockstep train` says of it.")
        notes += [f"{axis}: {row.name} can't be measured: {row.failed}" for row in here if row.failed]
        here = [row for row in here if not row.failed]
        if len(here) == 1:
            notes.append(f"{axis}: there is nothing to choose here")
            continue
        best = choose(here).config
        rows, exact = [*rows, *here], exact if axis == "precision" else best
    others = [each["others_cores"] for row in rows for each in row.rounds.values()]
    notes += filter(None, [measuring.busy(max(others, default=0.0))])
    exactly, quickest = (shlex.join(["lockstep", *train_arguments(each)]) for each in (exact, best))
    return rows, notes, exactly, quickest


def choose(rows: list[Choice]) -> Choice:
    """Compare with the first, and take the quickest of those that were quicker in all likelihood."""
    first, *others = rows
    for row in others:
        pairs = [(found, first.rounds[number]) for number, found in row.rounds.items()]
        row.ratio = measuring.median_of([own["images_per_s"] / base["images_per_s"] for own, base in pairs])
    quicker = {row.ratio["median"] or 0.0: row for row in others if row.ratio and (row.ratio["low"] or 0.0) > 1}
    winner = quicker[max(quicker)] if quicker else first
    winner.taken = True
    return winner


def measure_on_ranks(row: Row, seconds: float) -> dict[str, float]:
    """How fast the processes of a row train. Raises WorkerFailed."""
    rate, others = measuring.on_ranks(images_per_s, row.config, seconds, execution=row.config.execution)
    return {"images_per_s": rate, "others_cores": others}


def images_per_s(world: "World", config: Config, seconds: float) -> float:
    """Of real steps; all ranks call it together, and get the same."""
    from lockstep.training.assemble import assemble

    return 1 / measuring.speed(world, assemble(config, world), seconds, config.execution.workers)[0]


def print_tuned(rows: list[Choice], notes: list[str], exact: str, quickest: str) -> None:
    """A table of all choices, and the command to type."""
    rates = [statistics.median(each["images_per_s"] for each in row.rounds.values()) for row in rows]
    table = [
        Column("axis", [row.axis for row in rows], left=True),
        Column("choice", [row.name for row in rows], left=True),
        Column("images/s", [f"{rate:,.0f}" for rate in rates]),
        Column("over as it is", [measuring.written(row.ratio, 2) for row in rows]),
        Column("changes", [AXES[row.axis] if row.ratio else "" for row in rows], left=True),
        Column("", ["taken" if row.taken else "" for row in rows], left=True),
    ]
    more = ["or, with products of 8 bits (look at the accuracy):", quickest] if quickest != exact else []
    measuring.show(table, [*notes, "", exact, *more])
