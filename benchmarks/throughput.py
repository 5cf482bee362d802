"""Training throughput beside others: MNIST net and CIFAR ResNet-18 on 1 process x 1 thread, 1 x 2 and 2 x 1.

    python benchmarks/throughput.py --data-dir DIR [--peers-python PATH]          all rows, 40 minutes on two cores
    python benchmarks/throughput.py --data-dir DIR --rows mnist                   those whose name holds the word
    python benchmarks/throughput.py --data-dir DIR --rows "cifar10 1x2" --sides raw,tutorial --rounds 10 --seconds 1

Each in fp32 and bf16. Every side is a process of its own (two where the row has two), which stays alive and waits while
another one trains; "raw" (with memory kept too) and Lockstep take part in every piece. Pieces are put together in
results/throughput.json: a row's sides that are measured again replace what was there. Loader sides have --workers
processes in all, which are alive before the clock starts; with one thread there is none, since a worker would be a
second thread.
"""

import argparse
import json
import statistics
import sys
from typing import Any

from common import RESULTS, print_table, ratio, show, table, write
from peers.agree import Comparison
from peers.client import Race, available, race, versions
from peers.task import Task

NETS = {"mnist": 200, "cifar10": 64}  # global batch
SHAPES = {"1x1": (1, 1), "1x2": (1, 2), "2x1": (2, 1)}  # processes x threads
PRECISIONS = ("fp32", "bf16")
SIDES = {  # name -> (module, where its batches come from)
    "raw": ("raw", "tensors"),
    "raw again": ("raw", "tensors"),
    "raw, memory kept": ("kept", "tensors"),
    "lockstep": ("lockstep", "loader"),
    "tutorial": ("tutorial", "loader"),
    "ignite": ("ignite", "loader"),
    "ignite tensors": ("ignite", "tensors"),
    "fabric": ("fabric", "loader"),
    "fabric tensors": ("fabric", "tensors"),
    "lightning": ("lightning", "loader"),
    "lightning tensors": ("lightning", "tensors"),
    "accelerate": ("accelerate", "loader"),
    "accelerate tensors": ("accelerate", "tensors"),
    "timm loader": ("timm", "loader"),
}
UNORDERED = ("timm loader",)  # it shuffles by itself
TOLERANCE = {"fp32": 1e-2, "bf16": 1e-1}  # of the weights' distance; bf16 keeps 8 bits
COMPARE = 3  # steps after which weights are compared

ROWS = [f"{net} {shape} {precision}" for net in NETS for shape in SHAPES for precision in PRECISIONS]


def task(row: str, data: str, workers: int, data_dir: str) -> Task:
    """A row's task for sides whose batches come from tensors or from a loader."""
    net, shape, precision = row.split()
    ranks, threads = SHAPES[shape]
    return Task(
        net,
        NETS[net],
        data,
        precision,
        ranks,
        threads,
        workers if data == "loader" and ranks * threads > 1 else 0,
        data_dir,
    )


def measure(
    row: str, sides: list[str], python: str, rounds: int, seconds: float, workers: int, data_dir: str
) -> dict[str, Any]:
    """One row's sides: images/s, and how many times that Lockstep makes."""
    chosen = {name: (SIDES[name][0], task(row, SIDES[name][1], workers, data_dir)) for name in sides}
    found = race(
        chosen,
        python,
        rounds,
        compare=Comparison(COMPARE, TOLERANCE[row.split()[2]], unordered=UNORDERED),
        seconds=seconds,
    )
    return {name: side(row, name, found) for name in sides}


def side(row: str, name: str, found: Race) -> dict[str, Any]:
    """What is kept of a side; a rate's ratio is the inverse of the times'."""
    seconds, images = found.seconds[name], NETS[row.split()[0]] * found.steps
    return {
        "images_per_s": images / statistics.median(seconds),
        "lockstep_over": ratio(seconds, found.seconds["lockstep"]),
        "over_raw": ratio(found.seconds["raw"], seconds),
        "weights_apart": found.apart.get(name),
        "apart_in_float64": found.apart_in_float64.get(name),
        "rounds": len(seconds),
        "steps": found.steps,
        "idle_cores": found.idle,
    }


def tables(rows: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each net: Lockstep over each side, images/s, and how far the compared weights are apart."""
    made = []
    for net, batch in NETS.items():
        here = {row: found for row, found in rows.items() if row.split()[0] == net}
        names = [name for name in SIDES if any(name in found for found in here.values())]
        columns = ["side", *(row.removeprefix(f"{net} ") for row in here)]
        title = {"mnist": "MNIST net, Adadelta", "cifar10": "CIFAR ResNet-18, SGD, channels_last"}[net]
        floor = [show(found["raw again"]["over_raw"]) if "raw again" in found else None for found in here.values()]
        ratios = [
            [name, *(show(found[name]["lockstep_over"]) if name in found else None for found in here.values())]
            for name in names
            if name not in ("lockstep", "raw again")
        ]
        if here:
            made += [
                table(
                    f"{title}, batch {batch}: Lockstep's images/s over each side's",
                    columns,
                    [*ratios, ["noise floor: raw over raw", *floor]],
                    NOTES,
                ),
                table(f"{title}, batch {batch}: images/s", columns, _cells(here, names, "images_per_s", "{:,.0f}")),
                table(
                    f"{title}, batch {batch}: weights apart",
                    columns,
                    _cells(here, names, "weights_apart", "{:.0e}"),
                    APART,
                ),
            ]
    return made


def _cells(rows: dict[str, dict[str, Any]], names: list[str], key: str, form: str) -> list[list[Any]]:
    values = {name: [found.get(name, {}).get(key) for found in rows.values()] for name in names}
    return [[name, *(None if v is None else form.format(v) for v in values[name])] for name in names]


NOTES = [
    "Columns: processes x threads, precision (bf16: autocast). Median and 95 % bootstrap interval of paired ratios.",
    "tensors: batches out of tensors in memory (CIFAR: cropped and flipped a batch at once). The others: DataLoader "
    "over per-sample transforms, --workers (2) in all, none with one thread; they are alive and their queues full "
    "before the clock starts, so no start-up is in a figure.",
    "raw: the loop by hand over tensors; memory kept: with malloc told to keep what is freed, as Lockstep tells it, so "
    "that loop and allocator can be told apart. tutorial: DistributedSampler, plain DDP, .item() a step. timm: its "
    "loader with its own crop and prefetcher, in a loop by hand. lockstep: its loader and TrainStep, augmentation by "
    "sample.",
]
APART = [
    f"Distance to the raw loop's weights after {COMPARE} steps without dropout and augmentation, over the way that "
    "those have gone. timm's loader can't be compared: it shuffles by itself."
]


def chosen_sides(words: str, python: str) -> list[str]:
    """Sides whose names begin with a word of the list, raw and Lockstep always, as far as they are installed."""
    wanted = [name for name in SIDES if not words or any(name.startswith(word) for word in words.split(","))]
    found = {
        name: SIDES[name][0] for name in dict.fromkeys(["raw", "raw again", "raw, memory kept", "lockstep", *wanted])
    }
    return available(python, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help='words that a row\'s name holds, as "mnist 2x1" or "bf16"')
    parser.add_argument("--sides", default="", help="beginnings of names, as tutorial,ignite (default: all)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.7, help="of the raw loop's timed segment (at least a step)")
    parser.add_argument("--workers", type=int, default=2, help="loader processes over all ranks, with two threads")
    parser.add_argument("--data-dir", default="", help='default: $LOCKSTEP_DATA, else ./data; "made": random images')
    parser.add_argument("--peers-python", default=sys.executable, help="a Python that has lockstep and the peers")
    args = parser.parse_args()
    sides = chosen_sides(args.sides, args.peers_python)
    path = RESULTS / "throughput.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    for row in (r for r in ROWS if all(word in r.split() for word in args.rows.split())):
        found = measure(row, sides, args.peers_python, args.rounds, args.seconds, args.workers, args.data_dir)
        rows[row] = rows.get(row, {}) | found
        rows = {name: rows[name] for name in ROWS if name in rows}
        print(f"\n{row}: " + "; ".join(f"{n} {f['images_per_s']:,.0f}" for n, f in found.items()) + " images/s")
        write("throughput", {"peers": versions(args.peers_python), "rows": rows, "tables": tables(rows)})
    for each in tables(rows):
        print_table(each)


if __name__ == "__main__":
    main()
