"""How long training stands still for a checkpoint: Lockstep's writer beside a synchronous torch.save with fsync.

    python benchmarks/checkpoint.py                     # both networks, on what there is
    python benchmarks/checkpoint.py --nets resnet50     # ResNet-50, AdamW: the weights and twice as much state
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
from lockstep.distributed.devices import device_name
from lockstep.distributed.files import fsync


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


NETS = {  # model, side of its images, optimizer
    "resnet18": ("resnet18_cifar", 32, "SGD with momentum"),
    "resnet50": ("resnet50", 64, "AdamW"),
}


def measure(net: str, folder: Path, repeats: int, steps: int, batch: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    name, side, kind = NETS[net]
    model = models.build(name, in_channels=3, num_classes=10, image_size=side)
    model = model.to(device).to(memory_format=torch.channels_last)
    fused = device.type != "cpu"
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), 1e-4, fused=fused)
        if kind == "AdamW"
        else torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=fused)
    )
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
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
        for way in ("lockstep", "torch.save") if repeat % 2 else ("torch.save", "lockstep"):
            train(steps, during, writer)
            quiet.append(timed(device, whole_step))
            if way == "lockstep":  # its stall is in the records
                writer.save(repeat, model, optimizer, state={"step": repeat})
            else:
                took = timed(device, lambda: torch_save(folder / "torch", repeat, model, optimizer))  # noqa: B023
                stalls[way] += [took] if repeat >= 2 else []
    train(1, during, writer)
    writer.close()
    saved = writer.finished()
    stalls["lockstep"] = [entry["stall_ms"] for entry in saved[2:]]
    durable = [entry["durable_ms"] for entry in saved[2:]]
    return {
        "what": f"{name}, {kind}, channels_last, batch {batch}, fsync on",
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
    """A result as tables, one for each network."""
    return [_table(found) for found in result["nets"].values()]


def _table(found: dict[str, Any]) -> dict[str, Any]:
    shown = {f"training stands still: {name}": row for name, row in found["stall"].items()}
    shown["Lockstep's is on the disk after"] = found["lockstep_durable"]
    rows = [
        [name, *(f"{row[key]:.1f}" for key in ("p50_ms", "p99_ms", "max_ms")), row["count"]]
        for name, row in shown.items()
    ]
    steps = ", ".join(f"{when} {ms:.1f} ms" for when, ms in found["step_p50_ms"].items() if ms is not None)
    notes = [f"{found['what']}; file system {found['file_system']}. Median step: {steps}."]
    net = found["what"].partition(",")[0]
    title = f"{net}: a checkpoint of {found['mebibytes']} MiB beside a synchronous torch.save"
    return table(title, ["", "p50 ms", "p99 ms", "max ms", "checkpoints"], rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the checkpoints go (default: here)")
    parser.add_argument("--repeats", type=int, default=100, help="checkpoints of each kind")
    parser.add_argument("--steps", type=int, default=2, help="least number of steps between two checkpoints")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--nets", default=",".join(NETS), help="default: %(default)s")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(accelerator or "cpu"))
    args = parser.parse_args()
    device = torch.device(args.device)
    found = {}
    for net in args.nets.split(","):
        scratch = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=args.folder))
        try:
            found[net] = measure(net, scratch, args.repeats, args.steps, args.batch, device)
        finally:
            shutil.rmtree(scratch)
    result: dict[str, Any] = {"nets": found}
    result["tables"] = tables(result)
    for each in result["tables"]:
        print_table(each)
    write(f"checkpoint-{device.type}", result)


if __name__ == "__main__":
    main()
