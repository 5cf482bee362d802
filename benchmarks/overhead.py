"""What a step costs beside the network: Linear(10, 10), batch 8, one thread, SGD, tensors in memory.

    python benchmarks/overhead.py [--peers-python PATH] [--rounds 20]
    python benchmarks/overhead.py --rounds 10 --sides "raw,raw again,TrainStep"

Each side is a process of its own; before the timing the weights after 5,000 steps are compared with the raw loop's.
"raw again" is the raw loop in a second process: the noise floor. Writes results/overhead.json.
"""

import argparse
import statistics
import sys
from typing import Any

from common import print_table, ratio, show, table, write
from peers.agree import Comparison
from peers.client import Race, available, race, versions
from peers.task import STEPS_OF_VECTORS, Task

TASK = Task("linear", batch=8)
SIDES = {  # name -> (module, what it is)
    "raw": ("raw", "the loop by hand"),
    "raw again": ("raw", "the same in another process: the noise floor"),
    "TrainStep": ("lockstep", "Lockstep's TrainStep in a loop by hand"),
    "fit": ("fit", "Lockstep's whole training loop: order, loader, journal, progress, heartbeat; output to a file"),
    "fit+bar": ("bar", "the same on a terminal, with the bar drawn"),
    "ignite": ("ignite", "create_supervised_trainer"),
    "fabric": ("fabric", "Fabric.setup, Fabric.backward"),
    "accelerate": ("accelerate", "Accelerator.prepare, Accelerator.backward"),
    "lightning": ("lightning", "Trainer.fit; no logger, progress bar, checkpoints or summary"),
}


def result(found: Race, rounds: int, peers: dict[str, str]) -> dict[str, Any]:
    """What is kept: microseconds a step, and ratios over the raw loop."""
    sides, rows = {}, []
    for name, seconds in found.seconds.items():
        us = statistics.median(seconds) / found.steps * 1e6
        over = ratio(seconds, found.seconds["raw"]) if name != "raw" else None
        apart, exactly = found.apart.get(name), found.apart_in_float64.get(name)
        sides[name] = {"us_per_step": us, "over_raw": over, "weights_apart": apart, "apart_in_float64": exactly}
        shown = None if apart is None else f"{apart:.1e}"
        rows.append([name, round(us, 1), show(over) if over else None, shown])
    columns = ["side", "us/step", "over raw", "weights apart"]
    notes = [
        f"{rounds} interleaved rounds of {found.steps:,} steps; median and 95 % bootstrap interval of paired ratios.",
        f"Weights apart: distance to the raw loop's after {STEPS_OF_VECTORS:,} steps, over the way these have gone.",
        *(f"{name}: {SIDES[name][1]}." for name in found.seconds),
    ]
    shown_table = table("Overhead per step: Linear(10, 10), batch 8, 1 thread, SGD", columns, rows, notes)
    return {
        "peers": peers,
        "rounds": rounds,
        "steps": found.steps,
        "idle_cores": found.idle,
        "sides": sides,
        "tables": [shown_table],
    }


def measure(sides: list[str], python: str, rounds: int, steps: int = STEPS_OF_VECTORS) -> dict[str, Any]:
    """Run the benchmark; `sides` must hold "raw"."""
    chosen = {name: (SIDES[name][0], TASK) for name in ["raw", *(s for s in sides if s != "raw")]}
    compare = Comparison(STEPS_OF_VECTORS, steps_in_float64=STEPS_OF_VECTORS)  # an epoch: a part has another order
    found = race(chosen, python, rounds, compare=compare, steps=steps, warmup=2)
    return result(found, rounds, versions(python))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has lockstep and the peers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sides", default=",".join(SIDES), help="default: all of %(default)s")
    args = parser.parse_args()
    sides = args.sides.split(",")
    found = measure(available(args.peers_python, {s: SIDES[s][0] for s in sides}), args.peers_python, args.rounds)
    print_table(found["tables"][0])
    write("overhead", found)


if __name__ == "__main__":
    main()
