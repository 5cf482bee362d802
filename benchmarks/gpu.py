"""All that needs a GPU, in one command and within 8 minutes: one table a part, and results/gpu-DEVICE.json.

    python benchmarks/gpu.py [--data-dir DIR] [--budget-s 450] [--parts ceilings ladder mnist cifar10 cifar10-speed]
    python benchmarks/gpu.py --tiny --device cpu          the same at toy sizes, to see that it runs

Each part stops when its share of the budget is spent and keeps what it has; what fails is in its table. The file is
written after every part. Where MNIST or CIFAR-10 is absent, as many random images of the same shape take their place.
"""

import argparse
import contextlib
import gc
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import RESULTS, environment, interleave, interval, print_table, table
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms

from lockstep import recipe, train
from lockstep.config import Config, Precision
from lockstep.data import sources
from lockstep.data.image_sets import ArraySet
from lockstep.distributed.world import World
from lockstep.training.assemble import Run, assemble, build_model, load_data
from lockstep.training.precision import autocast, configure

SHARES = {"ceilings": 0.05, "ladder": 0.3, "mnist": 0.2, "cifar10": 0.2, "cifar10-speed": 0.25}  # of the budget
MNIST_EPOCHS, SEEDS = 10, 25
TURNS = 2  # runs of a side, in turns with the others'
Row = list[Any]


@dataclass
class Part:
    """What a part has to work with, and what it has found so far."""

    device: torch.device
    tiny: bool
    data_dir: str
    workers: int  # of the tutorials' loaders
    until: float  # by time.perf_counter()
    ceilings: dict[str, float]  # TFLOP/s by precision, and GB/s of a copy
    columns: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> World:
        return World.single(self.device)

    def late(self, seconds: float = 0.0) -> bool:
        """True where so many more seconds would take too long."""
        return time.perf_counter() + seconds > self.until

    def config(self, name: str) -> Config:
        """A recipe on this part's data: no checkpoints, toy data with --tiny."""
        config = recipe(name)
        kind = "mnist" if config.data.dataset == "mnist" else "cifar10"
        folder = sources.resolve_data_dir(self.data_dir)
        real = (folder / {"mnist": "MNIST/raw", "cifar10": "cifar-10-batches-bin"}[kind]).is_dir()
        dataset = f"gpu:tiny_{kind}" if self.tiny else config.data.dataset if real else f"gpu:random_{kind}"
        if dataset.startswith("gpu:"):
            self.notes = [f"Data: random images of {kind}'s shape{', 64 of them' * self.tiny}; top-1 says nothing."]
        return replace(
            config,
            data=replace(config.data, dataset=dataset),
            execution=replace(config.execution, data_dir=self.data_dir, nproc=1, log_every=50),
            recovery=replace(config.recovery, checkpoint_every="0", check_every=0),
        )


# ---- data of the right shape, as factories of image sets


def _random(train_count: int, val_count: int, *shape: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def images(count: int) -> tuple[Any, Any]:
        return rng.integers(0, 256, (count, *shape), np.uint8), np.arange(count, dtype=np.int64) % 10

    return images(train_count), images(val_count)


def random_mnist() -> tuple[Any, Any]:
    return _random(60_000, 10_000, 1, 28, 28)


def random_cifar10() -> tuple[Any, Any]:
    return _random(50_000, 10_000, 3, 32, 32)


def tiny_mnist() -> tuple[Any, Any]:
    return _random(64, 32, 1, 28, 28)


def tiny_cifar10() -> tuple[Any, Any]:
    return _random(64, 32, 3, 32, 32)


# ---- the parts


def seconds_of(work: Callable[[], object], device: torch.device, least: float) -> float:
    """Seconds a call, over as many calls as take `least` seconds, the device's queue empty before and after."""
    _synchronize(device)
    calls = 1
    while True:
        began = time.perf_counter()
        for _ in range(calls):
            work()
        _synchronize(device)
        spent = time.perf_counter() - began
        if spent >= least:
            return spent / calls
        calls = max(calls * 2, round(calls * least / max(spent, 1e-6)))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure_ceilings(part: Part) -> None:
    """The fastest that this device does plain matrix products and copies: medians of 7, on random data."""
    part.columns = ["what", "size", "reached"]
    device, least = part.device, 0.01 if part.tiny else 0.1
    n = 256 if part.tiny else 8192
    names = ["fp32", "bf16"] + ["tf32"] * (device.type == "cuda")
    for name in names:
        configure(name, device)
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if name == "bf16" else None) for _ in range(2))
        spent = statistics.median(seconds_of(lambda: a @ b, device, least) for _ in range(7))  # noqa: B023
        part.ceilings[name] = 2 * n**3 / spent / 1e12
        part.rows.append([f"matrix product, {name}", f"{n} x {n}", f"{part.ceilings[name]:.4g} TFLOP/s"])
    count = 2**18 if part.tiny else 2**29  # 2 GiB each: far more than any cache holds
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    spent = statistics.median(seconds_of(lambda: target.copy_(source), device, least) for _ in range(7))
    part.ceilings["copy"] = 2 * source.nbytes / spent / 1e9
    part.rows.append(["copy, read + written", f"{source.nbytes / 2**20:.0f} MiB", f"{part.ceilings['copy']:.4g} GB/s"])
    part.kept = dict(part.ceilings)


RUNGS: dict[str, dict[str, Any]] = {  # each adds to the one before
    "eager fp32": {},
    "+ channels_last": {"channels_last": True},
    "+ bf16": {"channels_last": True, "precision": "bf16"},
    "+ compile": {"channels_last": True, "precision": "bf16", "compile": True},
    "+ CUDA graphs": {"channels_last": True, "precision": "bf16", "compile": True, "compile_mode": "reduce-overhead"},
}


def measure_ladder(part: Part) -> None:
    """Training steps of CIFAR's ResNet-18 through Lockstep's loader and step, rung by rung, in interleaved rounds."""
    part.columns = ["rung", "images/s", "ms/step", "TFLOP/s", "of matmul", "GB/s", "of copy", "first step s"]
    batch = 16 if part.tiny else 512
    config = part.config("cifar10")
    sides: dict[str, Callable[[], float]] = {}
    facts: dict[str, tuple[str, float, float, float]] = {}  # precision, FLOPs, least bytes, seconds of the first step
    for name, options in RUNGS.items():
        rung = _rung(config, options, batch, part.tiny)
        if part.late(30 if "compile" in options and not part.tiny else 0):
            part.rows.append([name, "not measured: out of time", *[None] * 6])
            continue
        try:
            run = assemble(rung, part.world)
            batches = _endless(run)
            flops, moved = step_cost(build_model(rung, run.train.images).to(part.world.device), next(batches), rung)
            first = _first(run, batches, part.device)
            sides[name] = _steps(run, batches, rung.precision, part)
            facts[name] = rung.precision, flops, moved, first
        except Exception as error:  # a rung's failure is a result
            part.rows.append([name, _told(error), *[None] * 6])
    rounds = 2 if part.tiny else 10
    figures = interleave(sides, rounds)
    for name, values in figures.items():
        spent = statistics.median(values)
        precision, flops, moved, first = facts[name]
        rate, bandwidth = flops / spent / 1e12, moved / spent / 1e9
        limits = [part.ceilings.get(precision), part.ceilings.get("copy")]
        shares = [f"{x / limit:.1%}" if limit else None for x, limit in zip((rate, bandwidth), limits, strict=True)]
        row = [name, round(batch / spent), spent * 1e3, rate, shares[0], bandwidth, shares[1], round(first, 1)]
        part.rows.append(row)
        low, high = interval(values)
        part.kept[name] = {"s_per_step": spent, "low": low, "high": high, "tflops": rate, "gb_per_s": bandwidth}
    part.rows.sort(key=lambda row: list(RUNGS).index(row[0]))
    part.notes += [
        f"{rung.model.model}, batch {batch}, loader and augmentation included; {rounds} interleaved rounds.",
        "FLOPs are counted over forward and backward. GB/s: the bytes that eager training has to move at least (saved "
        "activations written and read once, weights, gradients, momentum)."
        + " With --tiny nothing is compiled."
        * part.tiny,
    ]


def _rung(config: Config, options: dict[str, Any], batch: int, tiny: bool) -> Config:
    fields = {key: value for key, value in options.items() if key != "precision"}
    model = replace(config.model, **{"channels_last": False, **({"model": "mlp"} if tiny else {}), **fields})
    precision = options.get("precision", "fp32")
    data = replace(config.data, drop_last=True)  # one shape: a short batch would be compiled again
    return replace(config, model=model, precision=precision, data=data, batch_size=batch)


def _endless(run: Run) -> Iterator[Any]:
    return itertools.chain.from_iterable(run.train.epoch(epoch) for epoch in itertools.count())


def _first(run: Run, batches: Iterator[Any], device: torch.device) -> float:
    """Seconds of the first step, which compiles; a few more follow, for graphs to be recorded and kernels chosen."""
    began = time.perf_counter()
    run.step(next(batches))
    _synchronize(device)
    spent = time.perf_counter() - began
    for _ in range(5):
        run.step(next(batches))
    return spent


def _steps(run: Run, batches: Iterator[Any], precision: str, part: Part) -> Callable[[], float]:
    def turn() -> float:
        configure(precision, part.device)  # process-wide, and another rung had its turn
        return seconds_of(lambda: run.step(next(batches)), part.device, 0.02 if part.tiny else 0.3)

    return turn


def step_cost(model: nn.Module, batch: Any, config: Config) -> tuple[float, float]:
    """Floating-point operations of a step's forward and backward pass, and the bytes that it must move at least.

    Bytes: the images, each saved activation written and read, and per weight of four bytes eight passes: read by
    forward, backward and update, written by the update; the gradient and the momentum each written and read.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    context = autocast(config.precision, batch.images.device)
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), context():
            loss = F.cross_entropy(model(batch.images), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return counter.get_total_flops(), batch.images.nbytes + 2 * sum(saved.values()) + 8 * parameters


def run_lockstep(config: Config, part: Part) -> dict[str, Any]:
    """A whole `lockstep.train` with journal and evaluation: its `end` record, and epochs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Path(folder, "weights").mkdir()
        train(config, part.world, Path(folder))
        end = json.loads(Path(folder, "journal.jsonl").read_text().splitlines()[-1])
    return {"seconds": end["seconds"], "top1": end["top1"], "epochs": config.epochs}


class Samples(Dataset[tuple[Tensor, int]]):
    """As torchvision's data sets: a picture for each index, through a transform."""

    def __init__(self, images: ArraySet, transform: Callable[[Image.Image], Tensor]) -> None:
        pixels, labels = images.load_all()
        self.pixels, self.labels, self.transform = pixels.permute(0, 2, 3, 1).squeeze(-1).numpy(), labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), int(self.labels[index])


def run_tutorial(config: Config, part: Part, make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, Any]:
    """The tutorials' way: a DataLoader with workers, transforms a sample at a time, `.item()` each step.

    Epochs until the config's number or the part's time is reached; each with its evaluation.
    """
    device, world = part.device, part.world
    configure("fp32", device)  # the side before may have left its own switches
    torch.backends.cudnn.allow_tf32 = True  # torch's own default
    train_set, val_set = load_data(config, world)
    assert isinstance(train_set, ArraySet)
    assert isinstance(val_set, ArraySet)
    plain = [transforms.ToTensor(), transforms.Normalize(train_set.mean, train_set.std)]
    random = []
    if config.data.crop_padding:
        random.append(transforms.RandomCrop(train_set.shape[1], padding=config.data.crop_padding))
    if config.data.flip:
        random.append(transforms.RandomHorizontalFlip())
    options: dict[str, Any] = {"num_workers": part.workers, "pin_memory": device.type != "cpu"}
    loader = DataLoader(Samples(train_set, transforms.Compose(random + plain)), config.batch_size, True, **options)
    val_loader = DataLoader(Samples(val_set, transforms.Compose(plain)), 1000, **options)
    model = build_model(replace(config, model=replace(config.model, channels_last=False)), train_set).to(device)
    optimizer, loss_of = make(model), nn.CrossEntropyLoss()
    took: list[float] = []
    correct = 0
    while len(took) < config.epochs and not (took and part.late(took[-1])):
        began, running, correct = time.perf_counter(), 0.0, 0
        model.train()
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
        model.eval()
        with torch.no_grad():
            for images, labels in val_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum().item()
        took.append(time.perf_counter() - began)
    return {"seconds": sum(took), "top1": correct / len(val_set), "epochs": len(took)}


def in_turns(part: Part, sides: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, str]:
    """Run the sides in turns, every other turn backwards, and keep what each found; returns those that failed, and why.

    After the first turn a side is left out where its time is up.
    """
    failed: dict[str, str] = {}
    for turn in range(1 if part.tiny else TURNS):
        for side in [*sides][:: -1 if turn % 2 else 1]:
            kept = part.kept.get(side)
            if side in failed or (turn and (kept is None or part.late(kept["seconds"] / turn))):
                continue
            try:
                found = sides[side]()
            except Exception as error:  # a side's failure is a result
                failed[side] = _told(error)
                part.kept.pop(side, None)
                continue
            kept = part.kept.setdefault(side, {"seconds": 0.0, "epochs": 0, "s_per_epoch": []})
            kept["seconds"] += found["seconds"]
            kept["epochs"] += found["epochs"]
            kept["s_per_epoch"].append(found["seconds"] / found["epochs"])
            kept["top1"] = found["top1"]
    return failed


def measure_training(
    part: Part, name: str, batch: int, epochs: int, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """Whole epochs with evaluation: Lockstep in each precision, then the tutorials' way in what time is left."""
    part.columns = ["side", "s/epoch", "epochs", "seconds", "top-1", "tutorials' way over it"]
    config = replace(part.config(name), batch_size=16 if part.tiny else batch, epochs=1 if part.tiny else epochs)
    if part.tiny:
        config = replace(config, model=replace(config.model, model="mlp" if name == "cifar10" else "mnist_net"))
    config = replace(config, optim=replace(config.optim, warmup_epochs=0.0))
    precisions: list[Precision] = ["fp32", "bf16", "tf32"] if part.device.type == "cuda" else ["fp32", "bf16"]
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        f"Lockstep {each}": partial(run_lockstep, replace(config, precision=each), part) for each in precisions
    }
    sides["the tutorials' way"] = lambda: run_tutorial(config, part, make)
    run_lockstep(replace(config, epochs=1), part)  # libraries are loaded and kernels chosen before anything is timed
    failed = in_turns(part, sides)
    tutorial = part.kept.get("the tutorials' way")
    for side, found in part.kept.items():
        pairs = zip(tutorial["s_per_epoch"], found["s_per_epoch"], strict=False) if tutorial else ()
        over = [theirs / ours for theirs, ours in pairs]
        shown = f"{statistics.median(over):.3g} [{min(over):.3g}, {max(over):.3g}]" if over else None
        per_epoch, top1 = statistics.median(found["s_per_epoch"]), f"{found['top1']:.2%}"
        part.rows.append([side, per_epoch, found["epochs"], found["seconds"], top1, shown])
    part.rows += [[side, why, *[None] * 4] for side, why in failed.items()]
    part.notes += [
        f"Batch {config.batch_size}; an epoch holds training and evaluation. Lockstep: the whole train() with its "
        f"journal, from the first step on. {TURNS} runs a side in turns: the median, and the range of paired ratios.",
        f"The tutorials' way: {part.workers} loader workers, transforms a sample at a time, .item() each step, float32 "
        "as torch sets it (TF32 in convolutions); it stops where its time is up.",
    ]


def measure_mnist(part: Part) -> None:
    measure_training(part, "mnist", 200, MNIST_EPOCHS, lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0))


def measure_cifar10(part: Part) -> None:
    measure_training(
        part,
        "cifar10",
        512,
        5,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4),
    )


def measure_speed(part: Part) -> None:
    """The recipe cifar10-speed over many seeds: seconds from the first step to the end, and top-1."""
    part.columns = ["seed", "seconds", "top-1"]
    config = part.config("cifar10-speed")
    if part.tiny:
        config = replace(config, epochs=1, batch_size=16, optim=replace(config.optim, warmup_epochs=0.0))
    seeds = 2 if part.tiny else SEEDS
    run_lockstep(replace(config, seed=seeds), part)  # compiles
    found: list[dict[str, Any]] = []
    for seed in range(seeds):
        if found and part.late(found[-1]["seconds"]):
            part.notes.append(f"Out of time after {seed} of {seeds} seeds.")
            break
        found.append(run_lockstep(replace(config, seed=seed), part))
        part.kept["runs"] = found
        part.rows.append([seed, found[-1]["seconds"], f"{found[-1]['top1']:.2%}"])
    for name, reduce in (("mean", statistics.fmean), ("median", statistics.median), ("least", min), ("most", max)):
        seconds, top1 = (reduce([each[key] for each in found]) for key in ("seconds", "top1"))
        part.rows.append([name, seconds, f"{top1:.2%}"])
        part.kept[name] = {"seconds": seconds, "top1": top1}
    part.notes.append("Seconds from the first step to the end, evaluation included; a run before them compiles.")


PARTS: dict[str, tuple[str, Callable[[Part], None]]] = {
    "ceilings": ("The device's ceilings", measure_ceilings),
    "ladder": ("CIFAR ResNet-18, a training step", measure_ladder),
    "mnist": ("MNIST, the PyTorch example's network", measure_mnist),
    "cifar10": ("CIFAR-10, ResNet-18", measure_cifar10),
    "cifar10-speed": ("CIFAR-10 in as little time as possible", measure_speed),
}


def _told(error: BaseException) -> str:
    return f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:150]


def measure(
    names: list[str], device: torch.device, tiny: bool, data_dir: str, workers: int, budget_s: float, out: Path | None
) -> dict[str, Any]:
    """Run the parts, each within its share of the budget and what those before it left."""
    began, share = time.perf_counter(), 0.0
    ceilings: dict[str, float] = {}
    result: dict[str, Any] = {"environment": environment(), "tiny": tiny, "failed": [], "parts": {}, "tables": []}
    if tiny:
        torch.compiler.set_stance("force_eager")  # compiling toys takes a minute
    for name in names:
        title, run = PARTS[name]
        share += SHARES[name] / sum(SHARES[each] for each in names)
        part = Part(device, tiny, data_dir, workers, began + share * budget_s, ceilings)
        entered = time.perf_counter()
        try:
            run(part)
        except Exception as error:  # the other parts are worth having
            part.notes.append(_told(error))
        if any("failed: " in str(text) for text in [*itertools.chain(*part.rows), *part.notes]):
            result["failed"].append(name)
        gc.collect()  # compiled models lie in cycles, and hold device memory
        part.notes.append(f"This part took {time.perf_counter() - entered:.0f} s.")
        result["parts"][name] = part.kept
        result["tables"].append(table(title, part.columns or ["nothing"], part.rows, part.notes))
        print_table(result["tables"][-1])
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(found or "cpu"))
    parser.add_argument("--tiny", action="store_true", help="toy sizes; writes nothing unless --out is given")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--workers", type=int, default=4, help="loader workers of the tutorials' way")
    parser.add_argument("--budget-s", type=float, default=450.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cpu":
        device = torch.device(device.type, device.index or 0)
    name = "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    default = None if args.tiny else RESULTS / f"gpu-{name.lower().replace(' ', '-')}.json"
    out = args.out or default
    workers = 0 if args.tiny else args.workers
    result = measure(args.parts, device, args.tiny, args.data_dir, workers, args.budget_s, out)
    print(
        f"\n{'written to ' + str(out) if out else 'nothing written'}; parts with failures: {result['failed'] or 'none'}"
    )


if __name__ == "__main__":
    main()
