"""The order at scale: the first batch of an epoch, its memory and a step's ids, with DistributedSampler beside it.

    python benchmarks/order.py [--repeats 7] [--sampler-samples 10_000_000]

Every first batch is taken in a process of its own, one of 8 ranks with 256 ids a step over all of them. Memory is what
the peak of resident memory grew by (Linux). Writes results/order.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from common import print_table, table, write

BATCH, RANKS = 256, 8
AIMS = {"first_ms": 10.0, "peak_mb": 10.0, "step_us": 300.0, "p99_us": 300.0}


class Numbers(Sized):
    """A data set of so many samples, for a sampler that asks for its length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def lockstep_ids(count: int) -> Iterator[object]:
    """The global ids of each step: every rank computes them all and takes its share."""
    from lockstep.data.order import Order

    return Order(count, BATCH, 0).steps(0)


def sampler_ids(count: int) -> Iterator[object]:
    """One rank's ids of each step."""
    from torch.utils.data import DistributedSampler

    ids: Iterator[int] = iter(DistributedSampler(Numbers(count), RANKS, 0))  # type: ignore[arg-type]
    while True:
        yield [next(ids) for _ in range(BATCH // RANKS)]


def observe(kind: str, count: int, steps: int = 1000) -> dict[str, float]:
    """What one process sees: milliseconds and MB up to the first batch, microseconds a step after it."""
    import torch

    import lockstep.data.order  # noqa: F401  importing is no part of an epoch's beginning

    torch.randperm(8)  # nor is torch's first call
    before = _resident_mb(reset=True)
    began = time.perf_counter()
    ids = {"lockstep": lockstep_ids, "sampler": sampler_ids}[kind](count)
    next(ids)
    first_ms = (time.perf_counter() - began) * 1e3
    grown = _resident_mb() - before
    took = []
    for _ in range(min(steps, count // BATCH - 1)):
        began = time.perf_counter()
        next(ids)
        took.append((time.perf_counter() - began) * 1e6)
    return {
        "first_ms": first_ms,
        "peak_mb": grown,
        "step_us": statistics.median(took),
        "p99_us": sorted(took)[int(0.99 * len(took))],
    }


def _resident_mb(reset: bool = False) -> float:
    """The highest resident memory of this process so far; `reset`: from now on, what it is now."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def measure(sizes: list[int], sampler_samples: int, repeats: int) -> dict[str, Any]:
    """Medians over processes, each with one first batch."""
    cases = [("lockstep", size) for size in sizes] + [("sampler", sampler_samples)]
    rows, kept = [], {}
    for kind, count in cases:
        seen = []
        for _ in range(repeats):
            command = [sys.executable, __file__, "--observe", kind, str(count)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
            seen.append(json.loads(done.stdout))
        found = {name: statistics.median(each[name] for each in seen) for name in AIMS}
        kept[f"{kind} {count}"] = found
        name = "Order" if kind == "lockstep" else "DistributedSampler"
        rows.append([name, f"{count:.0e}", *(round(found[key], 2) for key in AIMS)])
    for size in sizes:
        rows.append(["DistributedSampler", f"{size:.0e}", *["not measured"] * len(AIMS)])
    columns = ["order", "samples", "first batch ms", "peak MB", "us/step", "p99 us"]
    notes = [
        f"Medians of {repeats} processes; {BATCH} ids a step over {RANKS} ranks: Order computes all of them on every "
        "rank, DistributedSampler brings a rank's own. A step: median and 99th percentile of 1,000.",
        "Aims: a first batch in at most 10 ms and 10 MB, a step in at most 300 us.",
        "DistributedSampler lists all ids on every rank; its memory grows with the samples, so 10^9 would take "
        f"{kept[f'sampler {sampler_samples}']['peak_mb'] * 1e6 / sampler_samples:.0f} GB a rank.",
    ]
    return {"aims": AIMS, "rows": kept, "tables": [table("The order at scale", columns, rows, notes)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**9, 10**12])
    parser.add_argument("--sampler-samples", type=int, default=10**7)
    parser.add_argument("--observe", nargs=2, metavar=("KIND", "SAMPLES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.observe:
        print(json.dumps(observe(args.observe[0], int(args.observe[1]))))
        return
    result = measure(args.samples, args.sampler_samples, args.repeats)
    for shown in result["tables"]:
        print_table(shown)
    write("order", result)


if __name__ == "__main__":
    main()
