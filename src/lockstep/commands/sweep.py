"""`lockstep sweep`: train once for each combination of values, and compare the settings, seed by seed."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from lockstep.commands import measuring
from lockstep.commands.measuring import Log, NotMeasured, Row
from lockstep.commands.shared.arguments import planned, print_error, refuse_launched
from lockstep.commands.shared.grid import Column
from lockstep.config import Config
from lockstep.config.fields import Arg, Names, flag_names, require, split_commas, with_values
from lockstep.config.flags import HABITS, parse_words
from lockstep.config.optim import SMALLER_IS_BETTER
from lockstep.errors import EXIT_FAILURE, unknown
from lockstep.monitoring.journal import Record

_NOT_VARIED = ("out", "config", "resume", "override", "node-rank")


@dataclass(frozen=True)
class Plan:
    """What to vary."""

    vary: Annotated[Names, Arg(words=True)] = ()
    """What differs: a flag's name and its values, as --vary lr=0.1,0.2 --vary seed=0,1,2; every combination is run."""
    config: Config = field(default_factory=Config, metadata={"hidden": ("resume", "override")})

    def __post_init__(self) -> None:
        self.values()
        measuring.require_one_machine("sweep", self.config)

    def values(self) -> dict[str, dict[str, str]]:
        """By the name of a flag its values, each as an argument. Raises UserError for no flag, or something twice."""
        found: dict[str, dict[str, str]] = {}
        flags = {name.removeprefix("--"): flag for name, flag in flag_names(Config).items()}
        flags |= {habit.strip("-"): flags[name[2:]] for habit, name in HABITS.items() if name[2:] in flags}
        for text in self.vary:
            typed, equals, several = text.partition("=")
            name, values = typed.removeprefix("--").replace("_", "-"), split_commas(several)
            require(equals and values, f"--vary {text} is not a name and values", "As --vary lr=0.1,0.2.")
            if name not in flags or name in _NOT_VARIED:
                raise unknown("flag in --vary", name, {*flags} - {*_NOT_VARIED}, "As --vary lr=0.1,0.2.")
            switch, name = flags[name].kind is bool, flags[name].name.removeprefix("--")
            twice = name in found or len(set(values)) < len(values)
            require(not twice, f"--vary {name}: something is there twice", "Give each value once: --vary lr=0.1,0.2.")
            require(not switch or {*values} <= {"true", "false"}, f"--vary {text}", f"As {name}=true,false.")
            words = {"true": f"--{name}", "false": f"--no-{name}"} if switch else {}
            found[name] = {value: words.get(value, f"--{name}={value}") for value in values}
        return found

    def runs(self) -> dict[str, dict[int, Config]]:
        """By setting (as `lr=0.1 wd=0.01`; empty where the seed alone varies) and seed, the config of each run."""
        values = {"seed": {"": f"--seed={self.config.seed}"}, **self.values()}
        require(self.vary, "nothing varies", "Name it: --vary lr=0.1,0.2 --vary seed=0,1,2.")
        seeds, found = values.pop("seed").values(), dict[str, dict[int, Config]]()
        for chosen in itertools.product(*values.values()):
            words = [values[name][value] for name, value in zip(values, chosen, strict=True)]
            configs = [_with(self.config, [*words, seed]) for seed in seeds]
            setting = " ".join(f"{name}={value}" for name, value in zip(values, chosen, strict=True))
            found[setting] = {each.seed: each for each in configs}
        folders = {folder_of(setting, seed) for setting, configs in found.items() for seed in configs}
        require(len(folders) == len(found) * len(seeds), "two of the runs would have one folder", "Give other values.")
        return found


def folder_of(setting: str, seed: int) -> str:
    """The name of a run's folder in the sweep's."""
    return re.sub(r"[^\w.=+-]+", "_", f"{setting} seed={seed}".strip())


def _with(config: Config, words: list[str]) -> Config:
    """The config with some arguments, checked as the command line checks them."""
    made: Config = with_values(config, parse_words(words, flag_names(Config)).values)
    return made


def main(args: list[str]) -> int:
    """Train variants of a recipe, and compare them."""
    about = (
        "Train by the recipe `{}` once for every combination of the values of --vary, and table the results with "
        "intervals over seeds. Runs of one seed share every draw, so the differences are paired. The same command with "
        "the same --out goes on with what is missing. Example: --vary lr=1e-3,3e-3 --vary seed=0,1,2."
    )
    plan: Plan = planned("sweep", lambda config: Plan(config=config), args, about)
    results = sweep(plan, print_error, measuring.train_in)
    measuring.show(columns(results), explanations(results))
    return EXIT_FAILURE if any(row["failed"] for row in results["rows"]) else 0


def sweep(plan: Plan, log: Log, train: Callable[[Path, Config], list[Record]]) -> dict[str, Any]:
    """Run what is missing, write the sweep's folder, and return what results.json holds.

    On Ctrl-C finished runs stay, and the one under way goes on next time. Raises UserError as `claim` and `check` do.
    """
    from lockstep.training.run_folder import check

    refuse_launched("sweep")
    runs, metric = plan.runs(), plan.config.selection.keep_best
    for config in (config for configs in runs.values() for config in configs.values()):
        check(config)
    folder, seeds = measuring.claim("sweep", plan.config, {}), list(next(iter(runs.values())))

    def run(row: Row, number: int) -> dict[str, Any]:
        seed = seeds[number - 1]
        name = folder_of(row.name, seed)
        found: dict[str, Any] = {"setting": row.name, "seed": seed, "folder": name, "failed": ""}
        try:
            return found | scores(train(folder / name, runs[row.name][seed]), metric)
        except NotMeasured as error:  # the setting's other seeds are run all the same
            log(f"{row.name or 'as it is'}, seed {seed} failed: {error}")
            return found | {"failed": str(error)}

    rows = [Row(setting, plan.config, "", {}) for setting in runs]
    with measuring.resumable(folder, log):
        measuring.run_rounds(rows, len(seeds), run, log)
        found = [result for row in rows for _, result in sorted(row.rounds.items())]
        results = {"config": plan.config.to_dict(), "metric": metric, "rows": found, "settings": summary(rows)}
        measuring.write_results(folder, results)
    return results


def scores(records: Sequence[Record], metric: str) -> dict[str, Any]:
    """What a run came to: its last evaluation and its best one, by --keep-best."""
    end, evals = dict(records[-1]), [dict(record) for record in records if record["kind"] == "eval"]
    name = "macro_recall" if metric == "balanced-accuracy" else metric.replace("-", "_")
    values: list[Any] = [each[name] if isinstance(each[name], (int, float)) else None for each in evals]  # NaN: a text
    best = (min if metric in SMALLER_IS_BETTER else max)((v for v in values if v is not None), default=None)
    return {
        "final": values[-1],
        "best": best,
        **{key: end[key] for key in ("steps", "ledger_sha256", "weights_sha256")},
    }


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A row a setting: its seeds, final and best values, and the difference to the first setting, seed by seed.

    Runs of one seed begin with the same weights and draw alike, so what seeds have in common falls out of it.
    """
    first, out = dict[int, Any](), list[dict[str, Any]]()
    for row in rows:
        runs = {each["seed"]: each for each in row.rounds.values() if not each["failed"] and each["final"] is not None}
        pairs = [(runs[seed], first[seed]) for seed in runs if seed in first]
        found = {
            "setting": row.name,
            "seeds": sorted(runs),
            "failed": sum(bool(each["failed"]) for each in row.rounds.values()),
            "final": measuring.mean_of([run["final"] for run in runs.values()]),
            "best": measuring.mean_of([run["best"] for run in runs.values()]),
            "difference": measuring.mean_of([own["final"] - other["final"] for own, other in pairs]),
            "same_samples": all(own["ledger_sha256"] == other["ledger_sha256"] for own, other in pairs),
        }
        first, out = first if out else runs, [*out, found]
    return out


def columns(results: Mapping[str, Any]) -> list[Column]:
    """The table."""
    metric, rows = results["metric"], results["settings"]

    def figure(key: str, sign: str = "") -> list[str]:
        return [measuring.written(row[key], 4 if metric == "loss" else 2, metric != "loss", sign) for row in rows]

    return [
        Column("setting", [row["setting"] or "as it is" for row in rows], left=True),
        Column("seeds", [str(len(row["seeds"])) for row in rows]),
        Column(f"last {metric}", figure("final")),
        Column("difference to the first", figure("difference", "+")),
        Column(f"best {metric}", figure("best"), 1),
    ]


def explanations(results: Mapping[str, Any]) -> list[str]:
    """Lines under the table."""
    rows, lines = results["settings"], ["One seed a setting: no intervals. Give several, as --vary seed=0,1,2."]
    if any(len(row["seeds"]) > 1 for row in rows):
        lines = [
            "Means over seeds, 95 % intervals (Student's t). Differences are paired: a seed's runs share all draws."
        ]
    lines += [f"{row['setting']}: {row['failed']} run(s) failed" for row in rows if row["failed"]]
    return lines + [f"{row['setting']}: in other batches than the first" for row in rows if not row["same_samples"]]
