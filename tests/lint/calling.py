"""Run the examples of the pages as they stand: `python -m tests.lint.calling right|wrong CODE...`.

In a folder with a small MNIST in data/. Each is executed in a process group of one; then its functions are called, with
arguments by their parameters' names.
"""

import inspect
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from docs.from_code import lint as pages
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OF_GPU = {"LS207", "LS213", "LS301", "LS303", "LS304", "LS306", "LS310", "LS402"}
SPAWNING = {"LS305", "LS314"}


def arguments(code: str) -> dict[str, Any]:
    """What functions of the examples take, by the names that they use."""
    torch.manual_seed(0)
    images, labels = torch.randn(40, 1, 28, 28), torch.randint(0, 10, (40,))
    dataset, model = TensorDataset(images, labels), nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    loader = DataLoader(dataset, batch_size=7)
    if code == "LS405":  # which only reads
        torch.save(model.state_dict(), f"{code}.pt")
    values = {
        "model net": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset test_set": dataset,
        "loader test_loader": loader,
        "images": images,
        "labels": labels,
        "loss value": torch.ones(()),
        "x": images,
        "epochs accumulate": 2,
        "global_batch_size": 8,
        "seed worker_id": 0,
        "share": 0.5,
        "path": f"{code}.pt",
        "resume": Path(f"{code}.pt").exists(),
    }
    return {name: value for names, value in values.items() for name in names.split()}


def call_all(code: str, program: str) -> int:
    """Execute an example, and call its functions; how many there were."""
    grouped = "init_process_group" not in program
    if grouped:
        dist.init_process_group("gloo")
    module = types.ModuleType("train")
    exec(compile(program, f"{code}/train.py", "exec"), vars(module))
    if not grouped:
        dist.init_process_group("gloo")
    called = 0
    for function in [each for each in vars(module).values() if inspect.isfunction(each) and each.__module__ == "train"]:
        names = inspect.signature(function).parameters
        for _ in range(0 if function.__name__ == "main" else 2 if "resume" in names else 1):
            known = arguments(code)
            function(**{name: known[name] for name in names})
            called += 1
    dist.destroy_process_group()
    return called


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "This DataLoader will create 4 worker processes")  # on two cores
    which, *codes = sys.argv[1:]
    done = []
    for code in codes:
        page = pages.read(code, chinese=False)
        try:
            call_all(code, page.right if which == "right" else page.wrong)
        except Exception as error:
            sys.exit(f"the {which} example of {code} ends with {type(error).__name__}: {error}")
        done.append(code)
    print(*done)


if __name__ == "__main__":
    main()
