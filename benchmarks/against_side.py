"""One measurement of against.py, by whichever tree is on PYTHONPATH: prints its figures as JSON."""

import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any


def overhead(folder: Path) -> dict[str, float]:
    """Microseconds a step over those of the loop by hand."""
    del folder
    import overhead

    sides: Any = overhead.measure(["raw", "TrainStep", "fit"], sys.executable, 3)["sides"]
    return {f"{name}: step / loop by hand": sides[name]["over_raw"]["ratio"] for name in ("TrainStep", "fit")}


def throughput(folder: Path) -> dict[str, float]:
    """The time of Lockstep's steps over that of the tutorials' way."""
    del folder
    import throughput

    figures = {}
    for row in ("mnist 1x2 fp32", "mnist 1x2 bf16", "mnist 2x1 fp32"):
        sides = throughput.measure(row, ["raw", "lockstep", "tutorial"], sys.executable, 4, 0.5, 2, "made")
        figures[f"{row}: step / tutorials' way"] = 1 / sides["tutorial"]["lockstep_over"]["ratio"]
        figures[f"{row}: ms / image"] = 1000 / sides["lockstep"]["images_per_s"]
    return figures


def exact(folder: Path) -> dict[str, float]:
    """Exact mode's step over DDP's, two processes of one thread."""
    del folder
    import exact
    from common import ratio

    from lockstep import launch, recipe

    config = recipe("mnist")
    config = replace(config, batch_size=200, data=replace(config.data, dataset="peers.task:made_mnist"))
    config = replace(config, execution=replace(config.execution, threads=1, device="cpu"))
    times = launch(exact.measure, config, 5, 4, nproc=2)[0]
    return {"exact / ddp step": ratio(times["exact"], times["ddp"])["ratio"]}


def checkpoint(folder: Path) -> dict[str, float]:
    """Milliseconds that training stands still for ResNet-50 with AdamW: in the call, and before the next update."""
    import torch
    from torch import nn

    from lockstep import models
    from lockstep.checkpoint.writer import Writer

    torch.manual_seed(0)
    model = models.build("resnet50", in_channels=3, num_classes=10, image_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    images, labels = torch.randn(16, 3, 64, 64), torch.arange(16) % 10
    writer = Writer(folder / "checkpoints", keep=1)
    how: dict[str, Any] = {"overlap": True} if "overlap" in inspect.signature(writer.save).parameters else {}
    stalls = []
    for number in range(12):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        while writer.busy:
            time.sleep(0.01)
        finished: list[Any] = writer.finished()  # records, and in older commits objects
        stalls += [saved["stall_ms"] if isinstance(saved, dict) else saved.stall_ms for saved in finished]
        writer.save(number, model, optimizer, **how)
    writer.close()
    stalls = sorted(stalls[2:])  # the first ones touch their memory for the first time
    return {"checkpoint: median stall, ms": stalls[len(stalls) // 2], "checkpoint: longest stall, ms": stalls[-1]}


def start(folder: Path) -> dict[str, float]:
    """Seconds from Enter to the first step of the digits."""
    figures = {}
    for nproc in (1, 4):
        out = folder / f"run{nproc}"
        flags = ["--epochs", "1", "--log-every", "1", "--nproc", str(nproc), "--threads", "1", "--out", str(out)]
        began = time.time()
        subprocess.run(
            [sys.executable, "-m", "lockstep", "train", "digits", *flags],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        records = map(json.loads, (out / "journal.jsonl").read_text(encoding="utf-8").splitlines())
        figures[f"start: first step on {nproc}, s"] = next(r["time"] for r in records if r["kind"] == "step") - began
    return figures


PARTS: dict[str, Callable[[Path], dict[str, float]]] = {
    function.__name__: function for function in (overhead, throughput, exact, checkpoint, start)
}

if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the runs print goes elsewhere
    print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]))), file=answers, flush=True)
