"""What Lockstep's own services cost: journal and progress on over off, and a checkpoint every 50 steps on over off.

    python benchmarks/features.py --data-dir DIR [--rounds 12]
    python benchmarks/features.py --data-dir made --rounds 2 --steps 10

MNIST, batch 64, the whole training loop; each segment is a one-epoch run of --steps steps in a folder of its own, in
turns within one process. Off: no record is written, no bar moves, and no loss is read on the way; no checkpoint. "off
again" is the quiet loop against itself, the noise floor. Writes results/features.json.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from common import interleave, print_table, ratio, show, table, write
from peers.fit import epoch_seconds
from peers.task import Task, data_dir, dataset, image_set

from lockstep import World, recipe
from lockstep.config import Config
from lockstep.training import loop
from lockstep.training.session import Session, Window

SIDES = {  # name -> (journal and progress, --checkpoint-every)
    "off": (False, "0"),
    "off again": (False, "0"),
    "journal and progress": (True, "0"),
    "checkpoint every 50 steps": (False, "50steps"),
    "both": (True, "50steps"),
}


def configured(task: Task, steps: int, every: str) -> Config:
    """The mnist recipe on so many steps of its set, on all cores."""
    base = recipe("mnist")
    part = steps * base.batch_size / len(image_set(task))
    return replace(
        base,
        epochs=1,
        data=replace(base.data, dataset=dataset(task), fraction=part, drop_last=True),
        execution=replace(base.execution, nproc=1, threads=torch.get_num_threads(), data_dir=data_dir(task)),
        recovery=replace(base.recovery, checkpoint_every=every),
    )


def quiet(live: Session, window: Window) -> None:
    """In the place of the loop's log: forgets the window, unread."""
    del live
    window.restart()


def side(config: Config, world: World, logged: bool) -> Callable[[], float]:
    """Seconds of an epoch, with the loop's own log or without."""

    def run() -> float:
        with ExitStack() as stack:
            if not logged:
                stack.enter_context(mock.patch.object(loop, "log", quiet))
            return epoch_seconds(config, world)

    return run


def measure(folder: str, rounds: int, steps: int) -> dict[str, Any]:
    """Run the benchmark."""
    task, world = Task("mnist", 64, data_dir=folder), World.single()
    sides = {name: side(configured(task, steps, every), world, logged) for name, (logged, every) in SIDES.items()}
    found = interleave(sides, rounds)
    rows, kept = [], {}
    for name, seconds in found.items():
        ms = statistics.median(seconds) / steps * 1e3
        over = ratio(seconds, found["off"]) if name != "off" else None
        kept[name] = {"ms_per_step": ms, "over_off": over}
        rows.append([name, f"{ms:.2f}", show(over) if over else None])
    notes = [
        f"{rounds} interleaved rounds of one-epoch runs of {steps} steps; {torch.get_num_threads()} threads. Median "
        "and 95 % bootstrap interval of paired ratios.",
        "Off: nothing written, no loss read. The evaluation and the checkpoint at the end of a run are not in it.",
    ]
    title = "Lockstep's services: mnist, batch 64, the whole loop"
    tables = [table(title, ["on", "ms/step", "over off"], rows, notes)]
    return {"rounds": rounds, "steps": steps, "sides": kept, "tables": tables}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=105, help="of a segment; two checkpoints fall into 105")
    parser.add_argument("--data-dir", default="", help='default: $LOCKSTEP_DATA, else ./data; "made": random images')
    args = parser.parse_args()
    result = measure(args.data_dir, args.rounds, args.steps)
    print_table(result["tables"][0])
    write("features", result)


if __name__ == "__main__":
    main()
