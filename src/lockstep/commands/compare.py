"""`lockstep compare`: strategies and numbers of processes, measured in turns under equal conditions."""

import json
import shlex
import shutil
import statistics
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from lockstep.commands import measuring
from lockstep.commands.measuring import Log, Row
from lockstep.commands.shared.arguments import planned, print_error, refuse_launched, train_arguments
from lockstep.commands.shared.grid import Column
from lockstep.config import Config, Ints, Names, Strategy
from lockstep.config.fields import Arg, require, with_values
from lockstep.distributed.files import write_json
from lockstep.errors import EXIT_FAILURE, UserError, unknown
from lockstep.monitoring.journal import Record

BASES: tuple[str, ...] = typing.get_args(Strategy)
# a strategy's words -> the flags that they stand for; N is the number that follows the word
WORDS: dict[str, dict[str, Any]] = {
    "exactN": {"exact": "N"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "tf32": {"precision": "tf32"},
    "accumulateN": {"accumulate": "N"},
    "fp16grads": {"compress": "fp16"},
    "bf16grads": {"compress": "bf16"},
    "syncbn": {"batch_norm": "global"},
    "compile": {"compile": True},
    "channels_last": {"channels_last": True},
}
_COUNTS = (1, 2, 4)  # where --nproc is left out, as far as there are cores or GPUs
# a measured run takes no checkpoint, and one that fails is not started again
_UNDISTURBED: dict[str, Any] = {"checkpoint_every": "0", "resume": "never", "max_restarts": 0}
WARMUP_STEPS = 20
_ENOUGH = 6  # rounds, for an interval of 95 %
FIGURES = (
    "seconds_per_epoch", "total_s", "images_per_s", "speedup", "efficiency", "data_wait", "communication",
    "memory_sum_gib", "memory_largest_gib", "memory_smallest_gib", "top1",
)  # fmt: skip


def settings_of(strategy: str) -> dict[str, Any]:
    """The flags that a strategy stands for, by the names of their fields. Raises UserError for what is none."""
    base, *words = strategy.split("+")
    if base.startswith("exact"):
        base, words = "ddp", [base, *words]
    remedy = f"In {strategy}. A strategy is BASE+WORD+..., as ddp+bf16+accumulate4."
    if base not in BASES:
        raise unknown("strategy", base, [*BASES, "exact8"], remedy)
    found: dict[str, Any] = {"strategy": base}
    for word in words:
        kind = word if word in WORDS else f"{word.rstrip('0123456789')}N"
        if kind not in WORDS:
            raise unknown("word", word, [name.replace("N", "4") for name in WORDS], remedy)
        digits = word.removeprefix(kind.removesuffix("N"))
        message = f"--strategies {strategy}: {word} without its number"
        require(kind == word or int(digits or 0), message, f"Write it as {kind.replace('N', '4')}.")
        for name, value in WORDS[kind].items():
            require(name not in found, f"--strategies {strategy}: {name} is set twice", "Leave one of the words out.")
            found[name] = int(digits) if value == "N" else value
    return found


@dataclass(frozen=True)
class Plan:
    """What to compare."""

    strategies: Names = ("ddp",)
    """BASE[+WORD...]: ddp, fsdp, exact8 (--exact 8); bf16, fp16, tf32, accumulate4, fp16grads
    and bf16grads (--compress), syncbn, compile, channels_last.
    Speed-ups refer to the first row that can be measured."""
    nproc: Annotated[Ints, Arg(unset="1,2,4 as far as there are cores or GPUs")] = ()
    """Numbers of processes."""
    repeats: int = 1
    """Rounds: each runs every row once. Two or more give intervals."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("nproc", "strategy", *_UNDISTURBED)})

    def __post_init__(self) -> None:
        require(self.strategies, "--strategies names nothing to compare", "Give one or more, as ddp,ddp+bf16.")
        settings = [settings_of(text) for text in self.strategies]
        twice = [text for k, text in enumerate(self.strategies) if settings[k] in settings[:k]]
        require(not twice, f"--strategies: {', '.join(twice)} is there twice", "Leave one of them out.")
        different = len({n for n in self.nproc if n >= 1}) == len(self.nproc)
        require(different, f"--nproc {self.nproc} are not different numbers of processes", "As 1,2,4; see --repeats.")
        require(self.repeats >= 1, f"--repeats {self.repeats} measures nothing", "Use 1 or more.")
        measuring.require_one_machine("compare", self.config)

    @classmethod
    def of(cls, config: Config, **chosen: Any) -> "Plan":
        """The plan for a config."""
        recovery = replace(config.recovery, **_UNDISTURBED)
        return cls(config=replace(config.with_execution(nproc="auto", strategy="ddp"), recovery=recovery), **chosen)

    def config_for(self, strategy: str, processes: int, cores: int, gpus: int) -> Config:
        """The config of a row: `cores` CPU threads, and on a CPU --workers too, shared out over its processes.

        Beside a GPU each process keeps its workers: what is compared there are GPUs, not one loader's division.
        Raises UserError for a strategy that the config, or so many processes, can't have.
        """
        execution = self.config.execution
        threads = execution.threads or max(1, cores // processes)
        workers = execution.workers if gpus else execution.workers // processes
        fields = settings_of(strategy) | {"nproc": processes, "threads": threads, "workers": workers, "out": ""}
        config: Config = with_values(self.config, fields)
        return config


@dataclass
class Measured(Row):
    """A row: a strategy on a number of processes."""

    strategy: str
    processes: int


def main(args: list[str]) -> int:
    """Measure strategies under equal conditions."""
    about = (
        "Train by the recipe `{}` with each strategy on each number of processes, in turns, with the same global "
        "batch, order, evaluation, total threads and total --workers, and table speed, waiting, memory and accuracy. "
        "The same command with the same --out goes on with what is missing. Exit code 1: the rows are not comparable."
    )
    results = compare(planned("compare", Plan.of, args, about), print_error, run_cell)
    measuring.show(columns(results), explanations(results))
    return 0 if results["fair"] else EXIT_FAILURE


def compare(plan: Plan, log: Log, measure: Callable[[Path, Config], dict[str, Any]]) -> dict[str, Any]:
    """Run what is missing of the comparison, write its folder, and return what results.json holds.

    On Ctrl-C finished runs stay. Raises UserError as `claim` and `check` do.
    """
    from lockstep.distributed.devices import device_name, devices, process_count
    from lockstep.distributed.proc import cores, cpu_model
    from lockstep.training.run_folder import check
    from lockstep.training.summary import versions

    refuse_launched("compare")
    check(plan.config.with_execution(nproc=1))
    available = devices(plan.config.execution)
    gpus = 0 if available[0].type == "cpu" else len(available)
    place = {"cpu": cpu_model(), "cores": cores(), "gpus": gpus, "device": device_name(available[0]), **versions()}
    room = process_count(plan.config.execution) if gpus else cores()  # fewer would start on so many cores by themselves
    counts = sorted(plan.nproc) or [n for n in _COUNTS if n <= room]
    rows = [row_of(plan, strategy, n, gpus, cores()) for strategy in plan.strategies for n in counts]
    folder = measuring.claim("compare", plan.config, {"environment": place})

    def measured(row: Row, number: int) -> Mapping[str, Any]:
        return measure(folder / f"{row.name.replace(' ', '-')}-r{number}", row.config)

    with measuring.resumable(folder, log):
        measuring.run_rounds(rows, plan.repeats, measured, log)
        results = {"config": plan.config.to_dict(), "repeats": plan.repeats, "environment": place, **aggregate(rows)}
        measuring.write_results(folder, results)
    return results


def row_of(plan: Plan, strategy: str, processes: int, gpus: int, cores: int) -> Measured:
    """A row, with the reason where it is known before anything starts that it can't be measured here."""
    from lockstep.distributed.devices import process_count
    from lockstep.training.run_folder import check

    row = Measured(f"{strategy} x{processes}", plan.config, "", {}, strategy, processes)
    try:
        row.config = config = plan.config_for(strategy, processes, cores, gpus)
        check(config)
        config.require_batch_for(process_count(config.execution))
        require(not 0 < gpus < processes, f"{processes} processes would share {gpus} GPU(s)")
        threads = processes * config.execution.threads
        message = f"{threads} threads on {cores} CPU cores would measure how they get in each other's way"
        require(gpus or threads <= cores, message)
        require(gpus or config.precision != "fp16", "fp16 on a CPU says nothing about fp16 on a GPU")
    except UserError as error:
        row.failed = error.message
    return row


def run_cell(folder: Path, config: Config) -> dict[str, Any]:
    """Train, and return what was measured; result.json keeps it, and what is there is not run again."""
    kept = folder / "result.json"
    if not kept.exists():
        others = measuring.watch_others()
        result = measure(measuring.train_in(folder, config), config.model.compile) | {"others_cores": others()}
        shutil.rmtree(folder / "weights", ignore_errors=True)  # of every row and round they would fill the disk
        write_json(kept, result)
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def measure(records: Sequence[Record], compiled: bool = False) -> dict[str, Any]:
    """What one journal records: seconds, images/s, fractions of the step spent waiting, memory, accuracy, digest.

    Training alone is what the `step` records cover, without the first WARMUP_STEPS steps, or the first epoch of a
    compiled model; at most half of the windows are left out. With one window nothing would remain: then the figures
    of the step are None.
    """
    end: Any = records[-1]
    steps = [r for r in records if r["kind"] == "step"]
    epochs = 1 + max((r["epoch"] for r in steps), default=0)
    starts = [(0, 0), *((r["step"], r["samples"]) for r in steps)]
    warm = max(WARMUP_STEPS, end["steps"] // epochs if compiled else 0)
    skip = min(sum(step < warm for step, _ in starts[:-1]), len(steps) // 2)
    # of each log window that counts: its steps, its samples, its record
    windows = [(r["step"] - step, r["samples"] - samples, r) for (step, samples), r in zip(starts, steps, strict=False)]
    kept = windows[skip:] if skip else []
    samples, seconds = sum(n for _, n, _ in kept), sum(n / r["images_per_s"] for _, n, r in kept)

    def part(waits: list[float | None]) -> float | None:
        """The fraction of the time that was spent waiting; `waits`: ms in each step of the windows."""
        known = [count * ms for (count, _, _), ms in zip(kept, waits, strict=True) if ms is not None]
        return sum(known) / 1e3 / seconds if kept and len(known) == len(kept) else None

    memory = end["peak_memory_gib"]  # of each process
    return {
        "seconds_per_epoch": seconds / samples * end["samples"] / epochs if kept else None,
        "total_s": end["seconds"],
        "images_per_s": samples / seconds if kept else None,
        "data_wait": part([r["data_wait_ms"] for _, _, r in kept]),
        "communication": part([r["comm_wait_ms"] for _, _, r in kept]),
        "memory_sum_gib": sum(memory) if memory else None,
        "memory_largest_gib": max(memory, default=None),
        "memory_smallest_gib": min(memory, default=None),
        "memory_gib": memory,
        "top1": end["top1"],
        "ledger_sha256": end["ledger_sha256"],
        "warmup_windows": skip,
    }


def aggregate(rows: Sequence[Measured]) -> dict[str, Any]:
    """Rows with their figures, and which rows had which order of samples.

    A speed-up is the baseline's seconds of training for an epoch over the row's, of the same round: what the machine
    does to a whole round falls out. Efficiency is the speed-up over the ratio of the processes.
    """
    base = next((row for row in rows if not row.failed), rows[0])
    ledgers: dict[str, list[str]] = {}
    for row in rows:
        for digest in {result["ledger_sha256"] for result in row.rounds.values()}:
            ledgers.setdefault(digest, []).append(row.name)
    table = [_figures(row, base) for row in rows]
    return {"baseline": base.name, "rows": table, "ledgers": ledgers, "fair": len(ledgers) <= 1}


def _figures(row: Measured, base: Measured) -> dict[str, Any]:
    rounds, times_more = {} if row.failed else dict(sorted(row.rounds.items())), row.processes / base.processes
    values: dict[str, list[float | None]] = {name: [r.get(name) for r in rounds.values()] for name in FIGURES}
    times = {k: each["seconds_per_epoch"] for k, each in base.rounds.items()}
    pairs = [(times[k], each["seconds_per_epoch"]) for k, each in rounds.items() if k in times]
    values["speedup"] = [None if None in pair else pair[0] / pair[1] for pair in pairs]
    values["efficiency"] = [value and value / times_more for value in values["speedup"]]
    figures = {name: measuring.median_of(each) for name, each in values.items()}
    others = statistics.median([r.get("others_cores") or 0.0 for r in rounds.values()] or [0.0])
    note, speedup = f"not measured: {row.failed}" if row.failed else "", figures["speedup"]
    # what another precision or a compiler can give at best nobody knows
    same = row.strategy.partition("+")[2] == base.strategy.partition("+")[2]
    if same and speedup is not None and (doubt := measuring.beyond(speedup["median"] or 0.0, times_more)):
        figures["speedup"], figures["efficiency"], note = None, None, doubt
    elif rounds and figures["seconds_per_epoch"] is None:
        note = "figures of the step not measured: the run has one log window, which is the warm-up; see --log-every"
    plain: dict[str, Any] = {name: getattr(row, name) for name in ("name", "strategy", "processes")}
    plain |= {name: getattr(row.config.execution, name) for name in ("threads", "workers")}
    plain["command"] = shlex.join(["lockstep", *train_arguments(row.config)])
    note = note or measuring.busy(others)
    return plain | {"not_measured": row.failed, "note": note, "repeats": len(rounds), "others_cores": others} | figures


def columns(results: Mapping[str, Any]) -> list[Column]:
    """The table. What a narrow terminal leaves out first has the highest number."""
    epochs, rows = results["config"]["epochs"], results["rows"]

    def figure(key: str, title: str, spare: int = 0, places: int | None = None, percent: bool = False) -> Column:
        return Column(title, [measuring.written(row[key], places, percent) for row in rows], spare)

    return [
        Column("strategy", [row["name"] for row in rows], left=True),
        Column("threads each", [str(row["threads"]) for row in rows], 7),
        figure("seconds_per_epoch", "s/epoch"),
        figure("total_s", f"s for {epochs} epoch{'s' if epochs > 1 else ''}", 3),
        figure("images_per_s", "images/s", 4),
        figure("speedup", "speed-up", places=2),
        figure("efficiency", "efficiency", 1, 1, percent=True),
        figure("data_wait", "data wait", 6, 1, percent=True),
        figure("communication", "communication", 2, 1, percent=True),
        figure("memory_sum_gib", "memory, GiB", 5),
        figure("memory_largest_gib", "largest, GiB", 8),
        figure("memory_smallest_gib", "smallest, GiB", 9),
        figure("top1", "top-1", 0, 2, percent=True),
    ]


def explanations(results: Mapping[str, Any]) -> list[str]:
    """Lines under the table: what was compared, how to read it, a note on each row that has one."""
    rounds, place, config = results["repeats"], results["environment"], results["config"]
    many = f"medians of {rounds} interleaved rounds [95 % bootstrap intervals]"
    how = many if rounds > 1 else "one round, no interval"
    lines = [
        f"{config['recipe']}: {config['model']['model']} on {config['data']['dataset']}, batch {config['batch_size']}, "
        f"{config['epochs']} epoch(s), seed {config['seed']}; {place['cores']} cores of {place['cpu']}, "
        f"{place['gpus']} GPU(s), {place['device']}, torch {place['torch']}",
        f"Speed-up and efficiency against {results['baseline']}; {how}.",
    ]
    if 1 < rounds < _ENOUGH:  # the median lies outside all of n values with probability 2^(1 - n)
        most = 1 - 2.0 ** (1 - rounds)
        lines.append(f"{rounds} rounds: no interval of a median can hold it with more than {most:.0%}.")
    if not place["gpus"] and not config["execution"]["threads"]:
        share = f"All rows share {place['cores']} CPU threads, so more processes add no hardware"
        lines.append(f"{share}: an efficiency of 1 / processes is as good as the baseline.")
    lines += [f"{row['name']}: {row['note']}" for row in results["rows"] if row["note"]]
    if not results["ledgers"]:
        return [*lines, "No row could be measured here."]
    if results["fair"]:
        return [*lines, "All rows trained on the same samples in the same order."]
    ledgers = [f"  ledger {digest[:12]}: {', '.join(names)}" for digest, names in results["ledgers"].items()]
    return [*lines, "NOT COMPARABLE: the rows did not train on the same samples in the same order.", *ledgers]
