"""Exact mode on families of networks: `python -m tests.parallel.exact_families [NAME ...]`.

Two steps of eleven samples in five slices, in float32 and bfloat16, on odd sides where the network takes them, with
processes x threads of 1x1, 1x2, 2x1, 3x1 and 5x1, and one run that stops after a step on two processes and goes on with
three: one digest of the weights and of the final file, and one evaluation. Ends with 1 where there is another.
"""

import argparse
import sys
from typing import Any

from lockstep.config import Config, Precision
from tests.fuzz_law import trained
from tests.pool import Pool
from tests.training.families import FAMILIES, config_for

SLICES, SAMPLES, BATCH = 5, 22, 11
WAYS = ((1, 1), (1, 2), (2, 1), (3, 1), (5, 1))


def digests(pool: Pool, family: str, precision: Precision, ways: tuple[tuple[int, int], ...] = WAYS) -> dict[str, str]:
    """What each way of running leaves, by its name."""
    side, options = FAMILIES[family]
    odd = side if {"img_size", "image_size", "input_size"} & options.keys() else side + 1
    base = config_for(family, SAMPLES, odd, batch_size=BATCH, exact=SLICES, epochs=1, precision=precision)

    def config(processes: int, threads: int = 1) -> Config:
        return base.with_execution(nproc=processes, threads=threads)

    def left(parts: list[tuple[Config, int]]) -> str:
        end: dict[str, Any] = trained(pool, parts)
        return " ".join(str(end[name]) for name in ("weights_sha256", "file", "top1", "loss"))

    found = {f"{n}x{threads}": left([(config(n, threads), 0)]) for n, threads in ways}
    return found | {"stopped on 2, gone on with 3": left([(config(2), 1), (config(3), 0)])}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*")
    bad = []
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for family in parser.parse_args().families or FAMILIES:
        for precision in precisions:
            with Pool(timeout=600, single=True) as pool:
                try:
                    found = digests(pool, family, precision)
                except Exception as error:  # the next family gets other ranks
                    said, good = f"failed: {str(error).strip().splitlines()[-1]}", False
                else:
                    first = found["1x1"]
                    others = [name for name, left in found.items() if left != first]
                    said, good = f"other than 1x1: {', '.join(others)}", not others
                print(f"{family:<36} {precision}  {f'one digest, {first[:12]}' if good else said}", flush=True)
                bad += [] if good else [f"{family} {precision}"]
    print(f"{len(bad)} with another digest or failed: {', '.join(bad) or 'none'}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
