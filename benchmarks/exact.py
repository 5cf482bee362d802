"""Step time of exact mode over plain DDP, N = V = 2 processes of one thread each, in interleaved pairs.

    python benchmarks/exact.py [--pairs 12] [--data-dir DIR]

Prints the median ratio with a 95 % bootstrap interval beside an A/A run (plain DDP against itself, the noise floor) and
writes benchmarks/results/exact.json. Both sides train the same batches from the same weights.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from lockstep import World, launch, recipe
from lockstep.config import Config

CASES = {"mnist": (200, 10), "cifar10": (64, 2)}  # recipe -> global batch, steps a measurement


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


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

    sides = {
        "ddp": assemble(config, world),
        "ddp again": assemble(config, world),
        "exact": assemble(replace(config, shards=world.size), world),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs + 1):
        for name, run in sides.items():
            torch.use_deterministic_algorithms(name == "exact")
            spent = seconds(world, run, steps) / steps
            if pair:  # the first round warms up
                times[name].append(spent)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--data-dir", default="")
    args = parser.parse_args()
    rows = {}
    for name, (batch, steps) in CASES.items():
        config = replace(recipe(name), batch_size=batch)
        config = replace(config, execution=replace(config.execution, threads=1, data_dir=args.data_dir))
        times = launch(measure, config, steps, args.pairs, nproc=2)[0]
        row = {"ddp_ms": statistics.median(times["ddp"]) * 1e3, "exact_ms": statistics.median(times["exact"]) * 1e3}
        for side in ("ddp again", "exact"):
            ratios = [b / a for a, b in zip(times["ddp"], times[side], strict=True)]
            row[f"{side} / ddp"] = [statistics.median(ratios), *interval(ratios)]
        rows[f"{name}, batch {batch}"] = row
        shown = {key: value for key, value in row.items() if isinstance(value, list)}
        texts = [f"{key} {v[0]:.3f} [{v[1]:.3f}, {v[2]:.3f}]" for key, v in shown.items()]
        print(f"{name}, batch {batch}: ddp {row['ddp_ms']:.1f} ms, exact {row['exact_ms']:.1f} ms; {'; '.join(texts)}")
    environment = {"torch": torch.__version__, "python": platform.python_version(), "cpu": platform.processor()}
    result = {"environment": environment, "processes": 2, "threads": 1, "pairs": args.pairs, "rows": rows}
    out = Path(__file__).parent / "results" / "exact.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
