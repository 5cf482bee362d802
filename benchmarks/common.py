"""What all benchmarks share: interleaved rounds, ratios with their interval, results with their environment, tables."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from lockstep.commands.measuring import interval as interval
from lockstep.distributed.proc import cpu_model

RESULTS = Path(__file__).parent / "results"

Figure = TypeVar("Figure")


def interleave(sides: Mapping[str, Callable[[], Figure]], rounds: int, warmup: int = 1) -> dict[str, list[Figure]]:
    """The figures of each side, taken in turns; every other round runs backwards. Warm-up rounds are thrown away."""
    figures: dict[str, list[Figure]] = {name: [] for name in sides}
    for turn in range(-warmup, rounds):
        names = [*sides] if turn % 2 else [*sides][::-1]
        for name in names:
            figure = sides[name]()
            if turn >= 0:
                figures[name].append(figure)
    return figures


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Median of the ratios of paired figures, over / under, with its interval."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, high = interval(ratios)
    return {"ratio": statistics.median(ratios), "low": low, "high": high}


def show(found: Mapping[str, float]) -> str:
    """A ratio as text: 1.05 [1.03, 1.07]."""
    return f"{found['ratio']:.3g} [{found['low']:.3g}, {found['high']:.3g}]"


def environment() -> dict[str, Any]:
    """Where figures were taken: processor, cores, versions; no name or path of the machine."""
    import torch

    import lockstep

    names = ("torchvision", "numpy", "timm", "accelerate", "lightning", "pytorch-ignite")
    versions = {name: found for name in names if (found := _version(name))}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "cpu": f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "device": torch.get_device_module(accelerator).get_device_name() if accelerator else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": lockstep.__version__,
        **versions,
    }


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Keep a result as results/NAME.json, with the environment."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """A table as results keep it; page.py shows the list of these under the key "tables". Cells are text or numbers."""
    if wrong := [row for row in rows if len(row) != len(columns)]:
        raise ValueError(f"{title}: {len(columns)} columns, but a row of {len(wrong[0])}: {wrong[0]}")
    return {"title": title, "columns": list(columns), "rows": [list(row) for row in rows], "notes": list(notes)}


def cell(value: Any) -> str:
    """A cell as text: nothing as a dash, a float with three or four digits, a whole number with its thousands apart."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_table(found: Mapping[str, Any]) -> None:
    """A table on the terminal, in columns as wide as they need; numbers to the right."""
    lines = [found["columns"], *([cell(value) for value in row] for row in found["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(found["columns"]))]
    print(f"\n{found['title']}")
    for line in lines:
        print(
            "  ".join(
                f"{text:<{w}}" if i == 0 else f"{text:>{w}}"
                for i, (text, w) in enumerate(zip(line, widths, strict=True))
            )
        )
    for note in found["notes"]:
        print(f"  {note}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
