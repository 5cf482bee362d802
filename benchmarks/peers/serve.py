"""The process of one side's rank: builds, warms up, then answers `{"steps": K}` lines with `{"seconds": s}` lines.

    python -m peers.serve SIDE TASK_AS_JSON STEPS_BY_PRECISION_AS_JSON FOLDER

First it trains plain copies of the task, one in each of these precisions for so many steps, and writes their weights as
FOLDER/PRECISION.npz; then it builds the task itself. Between two lines it is blocked on its standard input.
"""

import importlib
import json
import os
import sys
from dataclasses import replace

import numpy as np
import torch

from peers.task import RANK, Task


def compared(side: str, task: Task, precision: str, steps: int, folder: str) -> None:
    """Write the weights after so many steps without dropout and augmentation."""
    if precision == "fp64":
        torch.set_default_dtype(torch.float64)  # what Fabric turns a model's outputs into
    plain = importlib.import_module(f"peers.{side}").build(replace(task, plain=True, precision=precision))
    require_threads(task)
    plain.run(steps)
    torch.set_default_dtype(torch.float32)
    if RANK == 0:
        weights = {name: value.numpy() for name, value in plain.model.state_dict().items()}
        np.savez(f"{folder}/{precision}.npz", **weights)


def require_threads(task: Task) -> None:
    """A peer's start-up may set another number of threads than it was given."""
    torch.set_num_threads(task.threads)


def main() -> None:
    side, task, compare, folder = sys.argv[1], Task(**json.loads(sys.argv[2])), json.loads(sys.argv[3]), sys.argv[4]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peers print goes elsewhere
    require_threads(task)
    for precision, steps in compare.items():
        compared(side, task, precision, steps, folder)
    built = importlib.import_module(f"peers.{side}").build(task)
    require_threads(task)

    def ask() -> int | None:
        line = sys.stdin.readline()
        return json.loads(line)["steps"] if line.strip() else None

    def answer(seconds: float) -> None:
        print(json.dumps({"seconds": seconds, "threads": torch.get_num_threads()}), file=answers, flush=True)

    answer(0.0)  # ready
    if built.serve is not None:
        built.serve(ask, answer)
    else:
        while (count := ask()) is not None:
            answer(built.run(count))
    os._exit(0)  # at once: nothing is left to save, and groups, workers and terminals end with the process


if __name__ == "__main__":
    main()
