"""The folder of a comparison: whose it is, and what is written into it."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.commands.compare import page, picture, tables
from lockstep.commands.compare.plan import Plan
from lockstep.config.plain import diff_configs
from lockstep.errors import UserError
from lockstep.processes.files import atomic_write, write_error


def claim(plan: Plan, place: Mapping[str, Any]) -> Path:
    """Make the comparison's folder, or take over one with the same config on the same machine; more rows are welcome.

    Raises:
        UserError: where it holds something else, naming what differs, or can't be written.
    """
    config = plan.config
    name = f"runs/compare-{config.recipe.replace(':', '.')}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.execution.out or name)
    ours = {"config": config.to_dict(), "environment": dict(place)}
    kept = folder / "compare.json"
    if kept.exists():
        there = json.loads(kept.read_text(encoding="utf-8"))
        if different := diff_configs(there, ours, ignore=("config.execution.out",)):
            raise UserError(
                "\n    ".join([f"{folder} holds a comparison under other conditions (there -> now):", *different]),
                "Rows are compared under equal conditions alone: name another folder with --out.",
            )
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no comparison", "Name another folder with --out.")
        replace_text(kept, json.dumps(ours, indent=2) + "\n")
    except OSError as error:
        raise write_error(folder, error) from error
    return folder


def replace_text(path: Path, content: str) -> None:
    """Write a file that is whole under its own name."""
    with atomic_write(path, durable=False) as file:
        file.write_text(content, encoding="utf-8")


def write(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Write results.json, table.md, table.csv, speedup.png and report.html; returns their names."""
    pictures = {mode: drawn for mode in ("light", "dark") if (drawn := picture.draw(results, mode))}
    texts = {
        "results.json": json.dumps(results, indent=1) + "\n",
        "table.md": tables.markdown(results),
        "table.csv": tables.as_csv(results),
        "report.html": page.html(results, pictures),
    }
    for name, content in texts.items():
        replace_text(folder / name, content)
    if "light" in pictures:
        (folder / "speedup.png").write_bytes(pictures["light"])
        return [*texts, "speedup.png"]
    (folder / "speedup.png").unlink(missing_ok=True)  # of an earlier state
    return [*texts]
