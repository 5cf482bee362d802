"""Speed-up over processes, with the ideal line and the intervals."""

import io
from collections.abc import Mapping
from typing import Any

# Okabe and Ito's colours, which people with any colour vision can tell apart, and lighter ones of the same hues
_COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7F7F7F"),
    "dark": ("#4FA8E0", "#FF8C42", "#2EC4A0", "#E39AC8", "#F0C05A", "#A5D8F7", "#C9A66B", "#B0B0B0"),
}
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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    if not drawn:
        return None
    ink, ground, grid = _INK[mode]
    figure = Figure(figsize=(8.0, 4.8), dpi=160, layout="constrained", facecolor=ground)
    axes = figure.add_subplot(facecolor=ground)
    counts = sorted({p["x"] for points in drawn.values() for p in points})
    base = next(row for row in results["rows"] if row["name"] == results["baseline"])["devices"]
    if len(counts) > 1:
        # processes that share the same cores can at best keep the pace
        ideal = [1.0 if _shares_cores(results) else n / base for n in counts]
        axes.plot(counts, ideal, "--", color=ink, alpha=0.6, linewidth=1.2, label="ideal")
    for number, (name, points) in enumerate(drawn.items()):
        aside = (number - (len(drawn) - 1) / 2) * _STEP * max(1.0, counts[-1] / 4)
        y = [p["y"] for p in points]
        axes.errorbar(
            [p["x"] + aside for p in points],
            y,
            yerr=[[p["y"] - p["low"] for p in points], [p["high"] - p["y"] for p in points]],
            label=name,
            color=_COLOURS[mode][number % len(_MARKERS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=6,
            linewidth=1.8,
            elinewidth=1.4,
            capsize=4,
        )
    _label(axes, results, counts, ink, grid)
    out = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(out, format="png")
    return out.getvalue()


def _shares_cores(results: Mapping[str, Any]) -> bool:
    """True where all rows have the same CPU threads in total."""
    return results["environment"]["device"] == "cpu" and not results["threads_each"]


def _label(axes: Any, results: Mapping[str, Any], counts: list[float], ink: str, grid: str) -> None:
    """Axes, title and legend."""
    gpus = results["environment"]["device"] != "cpu"
    shared = f" ({results['environment']['cores']} threads in all)" if _shares_cores(results) else ""
    axes.set_xlabel(f"{'GPUs' if gpus else 'processes'}{shared}", fontsize=12)
    axes.set_ylabel(f"speed-up over {results['baseline']}", fontsize=12)
    config = results["config"]
    axes.set_title(
        f"{config['model']['model']} on {config['data']['dataset']}, batch {config['batch_size']}",
        fontsize=12,
        loc="left",
        color=ink,
    )
    axes.set_xticks(counts, [f"{n:g}" for n in counts])
    axes.set_xlim(counts[0] - 0.3 * max(1, counts[-1] / 8), counts[-1] + 0.3 * max(1, counts[-1] / 8))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(ink)
    axes.tick_params(colors=ink, labelsize=11)
    axes.xaxis.label.set_color(ink)
    axes.yaxis.label.set_color(ink)
    legend = axes.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for words in legend.get_texts():
        words.set_color(ink)
