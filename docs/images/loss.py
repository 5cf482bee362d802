"""The picture of the README: `python docs/images/loss.py` trains the digits six times (minutes) and writes loss.png.

On the left what many scripts do: 64 images for each process. On the right `lockstep train --nproc N`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BATCH, EPOCHS = 64, 6
PROCESSES = {1: ("#56B4E9", 7.0), 2: ("#D55E00", 3.4), 4: ("#111111", 1.1)}  # colour and width of each one's line


def losses(nproc: int, batch_size: int) -> list[tuple[int, float]]:
    """(images seen, training loss) after each step of a run of the digits recipe."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"epochs": EPOCHS, "nproc": nproc, "batch-size": batch_size, "threads": 1, "log-every": 1}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "lockstep", "train", "digits", *words, "--out", folder], check=True)
        records = map(json.loads, (Path(folder) / "journal.jsonl").read_text().splitlines())
        return [(record["samples"], record["loss"]) for record in records if record["kind"] == "step"]


def main() -> None:
    """Train, draw, write."""
    figure = Figure(figsize=(9.0, 3.4), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for nproc, (colour, width) in PROCESSES.items():
        label = f"{nproc} process{'es' if nproc > 1 else ''}"
        left.plot(*zip(*losses(nproc, BATCH * nproc), strict=True), color=colour, linewidth=1.6, label=label)
        right.plot(*zip(*losses(nproc, BATCH), strict=True), color=colour, linewidth=width, label=label)
    left.set_title(f"a batch of {BATCH} for each process: N experiments", fontsize=11)
    right.set_title(f"Lockstep, a batch of {BATCH} in all: one experiment", fontsize=11)
    left.set_ylabel("training loss")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xlabel("images seen")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(Path(__file__).with_suffix(".png"))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
