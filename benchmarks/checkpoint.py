"""How long training stands still for a checkpoint: Lockstep's writer beside a synchronous torch.save with fsync.

    python benchmarks/checkpoint.py                     # ResNet-18 (32x32 stem), SGD with momentum, on what there is
    python benchmarks/checkpoint.py --folder /mnt/disk --repeats 100

The two take turns within one training run, so that both see the same machine. Between two checkpoints the model
trains, until the background write has ended at least; steps are timed with and without a write going on. Prints a
table and writes benchmarks/results/checkpoint-DEVICE.json.
"""

import argparse
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import print_table, table, write
from torch import nn

from lockstep import models
from lockstep.checkpoint.writer import Writer
from lockstep.processes.devices import device_name
from lockstep.processes.files import fsync


def torch_save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What most scripts do, made durable: temporary file, fsync, rename, fsync of the folder."""
    temporary = folder / "last.tmp"
    with temporary.open("wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / "last.pt")
    fsync(folder)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def timed(device: torch.device, act: Callable[[], Any]) -> float:
    """Milliseconds until the host may go on, the device's earlier work not counted."""
    synchronize(device)
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def summary(values: list[float]) -> dict[str, Any]:
    return {
        "p50_ms": round(quantile(values, 0.5), 3),
        "p99_ms": round(quantile(values, 0.99), 3),
        "max_ms": round(max(values), 3),
        "count": len(values),
    }


def measure(folder: Path, repeats: int, steps: int, batch: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = models.build("resnet18_cifar", in_channels=3, num_classes=10, image_size=32)
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=device.type != "cpu")
    images = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def whole_step() -> None:
        step()
        synchronize(device)

    def train(least: int, during: list[float], writer: Writer) -> None:
        done = 0
        while done < least or writer.busy:
            busy = writer.busy
            began = time.perf_counter()
            whole_step()
            if busy:
                during.append((time.perf_counter() - began) * 1000)
            done += 1

    (folder / "torch").mkdir()
    writer = Writer(folder / "lockstep", keep=2)
    stalls: dict[str, list[float]] = {"lockstep": [], "torch.save": []}
    quiet: list[float] = []
    during: list[float] = []
    durable: list[float] = []
    for repeat in range(repeats + 2):  # the first two warm up: they allocate the buffers and touch the folders
        for name in ("lockstep", "torch.save") if repeat % 2 else ("torch.save", "lockstep"):
            train(steps, during, writer)
            quiet.append(timed(device, whole_step))
            if name == "lockstep":
                took = timed(device, lambda: writer.save(repeat, model, optimizer, state={"step": repeat}))  # noqa: B023
            else:
                took = timed(device, lambda: torch_save(folder / "torch", repeat, model, optimizer))  # noqa: B023
            if repeat >= 2:
                stalls[name].append(took)
    writer.close()
    saved = writer.finished()
    durable = [entry["durable_ms"] for entry in saved[2:]]
    return {
        "what": "ResNet-18 (32x32 stem), SGD with momentum, channels_last, fsync on",
        "device": platform.machine() if device.type == "cpu" else device_name(device),
        "file_system": subprocess.run(
            ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "mebibytes": round(saved[-1]["bytes"] / 2**20, 1),
        "stall": {name: summary(values) for name, values in stalls.items()},
        "lockstep_durable": summary(durable),
        "step_p50_ms": {
            "no write going on": round(median(quiet), 3),
            "during a write": round(median(during), 3) if during else None,
        },
    }


def tables(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The result as a table."""
    shown = {f"training stands still: {name}": row for name, row in result["stall"].items()}
    shown["Lockstep's is on the disk after"] = result["lockstep_durable"]
    rows = [
        [name, *(f"{row[key]:.1f}" for key in ("p50_ms", "p99_ms", "max_ms")), row["count"]]
        for name, row in shown.items()
    ]
    steps = ", ".join(f"{when} {ms:.1f} ms" for when, ms in result["step_p50_ms"].items() if ms is not None)
    notes = [f"{result['what']}; file system {result['file_system']}. Median step: {steps}."]
    title = f"A checkpoint of {result['mebibytes']} MiB beside a synchronous torch.save"
    return [table(title, ["", "p50 ms", "p99 ms", "max ms", "checkpoints"], rows, notes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the checkpoints go (default: here)")
    parser.add_argument("--repeats", type=int, default=100, help="checkpoints of each kind")
    parser.add_argument("--steps", type=int, default=2, help="least number of steps between two checkpoints")
    parser.add_argument("--batch", type=int, default=16)
    found = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(found or "cpu"))
    args = parser.parse_args()
    device = torch.device(args.device)
    scratch = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=args.folder))
    try:
        result = measure(scratch, args.repeats, args.steps, args.batch, device)
    finally:
        shutil.rmtree(scratch)
    result["tables"] = tables(result)
    print_table(result["tables"][0])
    write(f"checkpoint-{device.type}", result)


if __name__ == "__main__":
    main()
