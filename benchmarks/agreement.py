"""Whether all sides of the throughput benchmark train the same experiment: their weights in float64; nothing is timed.

    python benchmarks/agreement.py --data-dir DIR [--peers-python PATH]
    python benchmarks/agreement.py --data-dir DIR --nets mnist --steps 100

Copies without dropout and augmentation take the same steps in float64, where rounding hides no difference: a rate, a
decay, a sample or an order that is another by a ten-millionth shows. Before it times anything the throughput benchmark
does the same with ten steps, and goes no further where a side's weights are others.
"""

import argparse
import sys
from typing import Any

from common import print_table, table, write
from peers.agree import IN_FLOAT64, Comparison
from peers.client import race, versions
from throughput import NETS, SHAPES, SIDES, UNORDERED, chosen_sides, task

TITLES = {"mnist": "MNIST net, Adadelta", "cifar10": "CIFAR ResNet-18, SGD"}
STEPS = {"mnist": 50, "cifar10": 10}


def measure(row: str, sides: list[str], python: str, steps: int, workers: int, data_dir: str) -> dict[str, float]:
    """Each side's distance from the raw loop's weights, over the way that these have gone."""
    chosen = {
        name: (SIDES[name][0], task(row, SIDES[name][1], workers, data_dir)) for name in sides if name not in UNORDERED
    }
    return race(chosen, python, 0, compare=Comparison(1, 1.0, steps)).apart_in_float64


def tables(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each network: sides by processes x threads."""
    made = []
    for net, batch in NETS.items():
        here = {row: found for row, found in rows.items() if row.split()[0] == net}
        if not here:
            continue
        steps = {found["steps"] for found in here.values()}
        names = dict.fromkeys(name for found in here.values() for name in found["apart"])
        lines = [[name, *(f"{found['apart'][name]:.0e}" for found in here.values())] for name in names]
        notes = [
            f"Distance to the raw loop's weights after {max(steps)} steps in float64, over the way that those have "
            f"gone; it has to be {IN_FLOAT64:.0e} at most."
        ]
        title = f"{TITLES[net]}, batch {batch}: the same experiment"
        made.append(table(title, ["side", *(row.split()[1] for row in here)], lines, notes))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--steps", type=int, default=0, help="default: 50 of the small network, 10 of the large one")
    parser.add_argument("--workers", type=int, default=2, help="loader processes over all ranks, with two threads")
    parser.add_argument("--data-dir", default="", help='default: $LOCKSTEP_DATA, else ./data; "made": random images')
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has lockstep and the peers")
    args = parser.parse_args()
    sides, rows = chosen_sides("", args.peers_python), {}
    for net in args.nets.split(","):
        steps = args.steps or STEPS[net]
        for shape in SHAPES:
            apart = measure(f"{net} {shape} fp32", sides, args.peers_python, steps, args.workers, args.data_dir)
            rows[f"{net} {shape}"] = {"steps": steps, "apart": apart}
            print(f"{net} {shape}: at most {max(apart.values()):.0e} ({len(apart)} sides)", flush=True)
    made = tables(rows)
    for each in made:
        print_table(each)
    write("agreement", {"peers": versions(args.peers_python), "rows": rows, "tables": made})


if __name__ == "__main__":
    main()
