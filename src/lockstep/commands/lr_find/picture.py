"""The loss over the learning rate."""

import io

from lockstep.config import Config


def draw(
    lr: list[float], loss: list[float], smoothed: list[float], suggestion: float | None, config: Config
) -> bytes | None:
    """A PNG; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(8.0, 4.8), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(lr, loss, ".", markersize=4, color="#56B4E9", label="loss of a batch")
    axes.plot(lr, smoothed, color="#0072B2", linewidth=2, label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color="#D55E00", linestyle="--", label=f"suggestion: {suggestion:.2g}")
    axes.set_xscale("log")
    low, high = min(smoothed), max(smoothed[0], *smoothed[: max(1, len(smoothed) // 2)])
    room = 0.3 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)  # what diverges would press the rest flat
    axes.set_xlabel("learning rate")
    axes.set_ylabel("training loss")
    axes.set_title(
        f"{config.recipe}: {config.model.model}, {config.optim.optimizer}, batch {config.batch_size}", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
