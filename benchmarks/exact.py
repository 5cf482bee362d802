"""Step time of exact mode over plain DDP, N = V = 2 processes of one thread each, in interleaved pairs.

    python benchmarks/exact.py [--pairs 12] [--data-dir DIR]

Prints the median ratio with a 95 % bootstrap interval beside an A/A run (plain DDP against itself, the noise floor) and
writes benchmarks/results/exact.json. Both sides train the same batches from the same weights.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from common import interval, print_table, show, table, write

from lockstep import World, launch, recipe
from lockstep.config import Config

CASES = {"mnist": (200, 10), "cifar10": (64, 2)}  # recipe -> global batch, steps a measurement
RATIOS = ("exact / ddp", "ddp again / ddp")


def seconds(world: World, run: object, steps: int) -> float:
    """Seconds for so many steps of a run, the slowest rank's."""
    batches = run.train.epoch(0)  # type: ignore[attr-defined]
    world.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        run.step(next(batches))  # type: ignore[attr-defined]
    world.barrier()
    return time.perf_counter() - began


def measure(world: World, config: Config, steps: int, pairs: int) -> dict[str, list[float]]:
    """Seconds a step of plain DDP, plain DDP again and exact mode, in turn."""
    from lockstep.training.assemble import assemble

    # a slice has batch statistics of its own, and so has a process here: else DDP's would talk in every layer
    config = replace(config, model=replace(config.model, batch_norm="local"))
    sides = {
        "ddp": assemble(config, world),
        "ddp again": assemble(config, world),
        "exact": assemble(replace(config, exact=world.size), world),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs + 1):
        for name, run in sides.items():
            torch.use_deterministic_algorithms(name == "exact")
            spent = seconds(world, run, steps) / steps
            if pair:  # the first round warms up
                times[name].append(spent)
    return times


def tables(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The result as a table."""
    rows = []
    for case, row in result["rows"].items():
        exact, again = (dict(zip(("ratio", "low", "high"), row[key], strict=True)) for key in RATIOS)
        rows.append([case, f"{row['ddp_ms']:.1f}", f"{row['exact_ms']:.1f}", show(exact), show(again)])
    notes = [f"{result['pairs']} interleaved rounds; median and 95 % bootstrap interval of paired ratios."]
    title = f"Exact mode over plain DDP: {result['processes']} processes of one thread"
    return [table(title, ["case", "DDP ms", "exact ms", "exact / DDP", "noise floor: DDP / DDP"], rows, notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--data-dir", default="")
    args = parser.parse_args()
    rows = {}
    for name, (batch, steps) in CASES.items():
        config = replace(recipe(name), batch_size=batch)
        # the self-check has its own benchmark, law.py; batch norm by process is nothing that it compares
        config = replace(config, execution=replace(config.execution, threads=1, data_dir=args.data_dir, law="off"))
        times = launch(measure, config, steps, args.pairs, nproc=2)[0]
        row = {"ddp_ms": statistics.median(times["ddp"]) * 1e3, "exact_ms": statistics.median(times["exact"]) * 1e3}
        for side in ("ddp again", "exact"):
            ratios = [b / a for a, b in zip(times["ddp"], times[side], strict=True)]
            row[f"{side} / ddp"] = [statistics.median(ratios), *interval(ratios)]
        rows[f"{name}, batch {batch}"] = row
    result = {"processes": 2, "threads": 1, "pairs": args.pairs, "rows": rows}
    result["tables"] = tables(result)
    print_table(result["tables"][0])
    write("exact", result)


if __name__ == "__main__":
    main()
