"""The runs of a sweep, one after the other, and what their journals say."""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lockstep.commands.compare.cells import printed_error, wait_for
from lockstep.commands.compare.folder import replace_text
from lockstep.commands.shared.arguments import refuse_launched, start_training
from lockstep.commands.sweep.plan import Plan, Variant
from lockstep.commands.sweep.table import markdown, summary
from lockstep.config import Config
from lockstep.config.choose import SMALLER_IS_BETTER
from lockstep.config.plain import diff_configs
from lockstep.errors import UserError
from lockstep.processes.files import write_error
from lockstep.processes.signals import sigterm_raises
from lockstep.training.folder import check
from lockstep.watch.journal import end_of, read

Log = Callable[[str], None]
Train = Callable[[Config, Path], int]  # to an exit code; `_trained`, or what stands in for it


def sweep(plan: Plan, log: Log, train: "Train | None" = None) -> dict[str, Any]:
    """Run what is missing, write results.json and table.md, and return what results.json holds.

    Raises:
        UserError: for a config that can't run at all, or a folder of another sweep.
        KeyboardInterrupt: on Ctrl-C; finished runs stay, and the one under way goes on next time.
    """
    refuse_launched("sweep")
    variants = plan.variants()
    for variant in variants:
        check(variant.config)
    folder = claim(plan)
    rows = []
    try:
        with sigterm_raises():
            for number, variant in enumerate(variants, 1):
                place = folder / variant.folder
                there = _completed(place)
                name = f"{variant.setting or 'as it is'}, seed {variant.seed}"
                log(f"run {number} of {len(variants)}: {name}{', is there' if there else ''}")
                code = 0 if there else (train or _trained)(variant.config, place)
                rows.append(_row(variant, place, code))
                if rows[-1]["failed"]:
                    log(f"{name} failed: {rows[-1]['failed']}")
    except (KeyboardInterrupt, SystemExit):
        log(f"stopped; the same command with --out {shlex.quote(str(folder))} goes on with what is missing")
        raise
    metric = plan.config.choose.keep_best
    results = {"config": plan.config.to_dict(), "metric": metric, "rows": rows, "settings": summary(rows)}
    replace_text(folder / "results.json", json.dumps(results, indent=1) + "\n")
    replace_text(folder / "table.md", markdown(results))
    log(f"results.json, table.md and {len(rows)} run folder(s) in {folder}")
    return results


def claim(plan: Plan) -> Path:
    """Make the sweep's folder, or take over one of the same config. Raises UserError where it holds something else."""
    config = plan.config
    name = f"runs/sweep-{config.recipe.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.execution.out or name)
    kept = folder / "sweep.json"
    try:
        if kept.exists():
            there = json.loads(kept.read_text(encoding="utf-8"))
            if different := diff_configs(there, config.to_dict(), ignore=("out", "recovery", "recipe")):
                raise UserError(
                    "\n    ".join([f"{folder} holds a sweep of another config (there -> now):", *different]),
                    "Name another folder with --out.",
                )
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no sweep", "Name another folder with --out.")
        replace_text(kept, json.dumps(config.to_dict(), indent=1) + "\n")
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


def _trained(config: Config, place: Path) -> int:
    """`lockstep train` in a process of its own; what it prints is in output.txt. Where it began, it goes on."""
    place.mkdir(parents=True, exist_ok=True)
    config = replace(config, execution=replace(config.execution, out=str(place)))
    return wait_for(start_training(config, place / "output.txt"))


def _completed(place: Path) -> bool:
    path = place / "journal.jsonl"
    end = end_of(read(path)) if path.exists() else None
    return end is not None and end["status"] == "completed"


def _row(variant: Variant, place: Path, code: int) -> dict[str, Any]:
    """What a run came to: its last evaluation and its best one, by --keep-best."""
    row: dict[str, Any] = {"setting": variant.setting, "seed": variant.seed, "folder": place.name, "failed": ""}
    if not _completed(place):
        output = place / "output.txt"
        text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
        return {**row, "failed": printed_error(text) or f"exit code {code}"}
    records = read(place / "journal.jsonl")
    metric = variant.config.choose.keep_best
    name = "macro_recall" if metric == "balanced-accuracy" else metric.replace("-", "_")
    evals: Sequence[dict[str, Any]] = [cast(dict[str, Any], r) for r in records if r["kind"] == "eval"]
    values = [r[name] for r in evals if isinstance(r[name], (int, float))]
    end = cast(dict[str, Any], end_of(records))
    return {
        **row,
        "final": evals[-1][name] if isinstance(evals[-1][name], (int, float)) else None,
        "best": (min if metric in SMALLER_IS_BETTER else max)(values, default=None),
        "steps": end["steps"],
        "seconds": sum(r["seconds"] for r in cast(list[dict[str, Any]], records) if r["kind"] == "end"),
        "ledger_sha256": end["ledger_sha256"],
        "weights_sha256": end["weights_sha256"],
    }
