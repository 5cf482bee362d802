"""Speed-up over processes, with the ideal line and the intervals."""

import io
from collections.abc import Mapping
from typing import Any

from lockstep.commands.shared.page import COLOURS

_MARKERS = "osD^vPX*"
_INK = {"light": ("#1f2328", "#ffffff", "#d0d7de"), "dark": ("#e6edf3", "#161b22", "#3d444d")}  # text, ground, grid
_STEP = 0.04  # points of one number of processes stand side by side, so that intervals don't hide each other


def lines(results: Mapping[str, Any]) -> dict[str, list[dict[str, float]]]:
    """By strategy: x (devices), speed-up and its interval, of what was measured."""
    out: dict[str, list[dict[str, float]]] = {}
    for row in results["rows"]:
        if (found := row["speedup"]) is not None:
            y = found["median"]
            low, high = (y, y) if found["low"] is None else (found["low"], found["high"])
            out.setdefault(row["strategy"], []).append({"x": row["devices"], "y": y, "low": low, "high": high})
    return {name: sorted(points, key=lambda p: p["x"]) for name, points in out.items()}


def draw(results: Mapping[str, Any], mode: str = "light") -> bytes | None:
    """A PNG for a light or a dark page; None where nothing was measured or matplotlib is not installed."""
    drawn = lines(results)
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    if not drawn:
        return None
    ink, ground, grid = _INK[mode]
    style: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink
    )
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), ground)
    style |= {"grid.color": grid, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    style |= {"font.size": 11, "axes.labelsize": 12, "axes.titlesize": 12, "axes.titlelocation": "left"}
    style |= {"lines.linewidth": 1.8, "lines.markersize": 6, "errorbar.capsize": 4, "legend.frameon": False}
    style |= {"axes.prop_cycle": cycler(color=COLOURS[mode]) + cycler(marker=_MARKERS)}
    out = io.BytesIO()
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.0, 4.8), dpi=160, layout="constrained")
        _plot(figure.add_subplot(), results, drawn, ink)
        figure.savefig(out, format="png")
    return out.getvalue()


def _plot(axes: Any, results: Mapping[str, Any], drawn: Mapping[str, list[dict[str, float]]], ink: str) -> None:
    counts = sorted({p["x"] for points in drawn.values() for p in points})
    base = next(row for row in results["rows"] if row["name"] == results["baseline"])["devices"]
    config, place = results["config"], results["environment"]
    shares_cores = place["device"] == "cpu" and not results["threads_each"]  # all rows have the same threads in total
    for number, (name, points) in enumerate(drawn.items()):
        aside = (number - (len(drawn) - 1) / 2) * _STEP * max(1.0, counts[-1] / 4)
        errors = [[p["y"] - p["low"] for p in points], [p["high"] - p["y"] for p in points]]
        axes.errorbar([p["x"] + aside for p in points], [p["y"] for p in points], errors, label=name, elinewidth=1.4)
    if len(counts) > 1:
        # processes that share the same cores can at best keep the pace
        ideal = [1.0 if shares_cores else n / base for n in counts]
        axes.plot(counts, ideal, "--", marker="", color=ink, alpha=0.6, linewidth=1.2, label="ideal")
    shared = f" ({place['cores']} threads in all)" if shares_cores else ""
    axes.set_xlabel(f"{'GPUs' if place['device'] != 'cpu' else 'processes'}{shared}")
    axes.set_ylabel(f"speed-up over {results['baseline']}")
    axes.set_title(f"{config['model']['model']} on {config['data']['dataset']}, batch {config['batch_size']}")
    margin = 0.3 * max(1, counts[-1] / 8)
    axes.set_xlim(counts[0] - margin, counts[-1] + margin)
    axes.set_xticks(counts, [f"{n:g}" for n in counts])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.8)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
