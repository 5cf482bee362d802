"""The data path: CIFAR-10's augmentation on one thread, and a folder of JPEG files through worker processes.

    python benchmarks/data.py [--data-dir DIR] [--rounds 12] [--images 256] [--workers 0 1 2]

Lockstep beside torchvision's per-sample transforms, torch's DataLoader tuned (persistent workers, prefetching, uint8
transforms) and timm's create_loader. Sides take turns; before the timing their results are compared where they are
meant to be equal. CPU time is that of this process and all its workers (Linux). Writes results/data.json.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleave, print_table, ratio, show, table, write
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import functional, v2

from lockstep.config import DataConfig
from lockstep.data import sources
from lockstep.data.augment import Augment
from lockstep.data.decoding import decode
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import TrainLoader, resident, streaming
from lockstep.data.order import Order
from lockstep.distributed.world import World
from lockstep.randomness import integers_np, stream

CPU = torch.device("cpu")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
SIZE, HEIGHT, WIDTH, BATCH = 224, 375, 500, 32


# ---- CIFAR-10 on one thread


def cifar(data_dir: str, count: int) -> tuple[ArraySet, str]:
    """So many training images of CIFAR-10, or random ones where it is absent, and which."""
    root = sources.resolve_data_dir(data_dir)
    if (root / "cifar-10-batches-bin").is_dir():
        train, _ = sources.load(DataConfig(dataset="cifar10"), root, 0, World.single())
        pixels, what = train.read(np.arange(count), None)[0].numpy(), "CIFAR-10"
    else:
        pixels, what = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32), np.uint8), "random 32x32 images"
    return ArraySet("cifar", ("0",), MEAN, STD, (pixels,), np.zeros(count, np.int64), "cifar"), what


def by_hand(images: Tensor, ids: Tensor, augment: Augment, epoch: int) -> Tensor:
    """What `augment` makes, by torchvision's functions with the same draws, one sample after the other."""
    out = []
    offsets = [integers_np(stream(augment.seed, word, epoch), ids.numpy(), 9) for word in ("crop-y", "crop-x")]
    mirrored = integers_np(stream(augment.seed, "flip", epoch), ids.numpy(), 2)
    for image, top, left, flip in zip(images, *offsets, mirrored, strict=True):
        crop = functional.crop(functional.pad(image, [4]), int(top), int(left), 32, 32)
        scaled = functional.convert_image_dtype(functional.hflip(crop) if flip else crop, torch.float32)
        out.append(functional.normalize(scaled, list(augment.mean), list(augment.std)))
    return torch.stack(out)


def measure_cifar(data_dir: str, count: int, rounds: int) -> dict[str, Any]:
    """Images a second of fetching and augmenting in batches of 512, on one thread."""
    images, what = cifar(data_dir, count)
    augment = Augment(MEAN, STD, 0, crop_padding=4, flip=True)
    ids = torch.arange(min(512, count))
    theirs = by_hand(images.read(ids.numpy())[0], ids, augment, 0)
    torch.testing.assert_close(augment(images.read(ids.numpy())[0], ids, 0), theirs, rtol=0, atol=1e-5)
    loader = TrainLoader(images, Order(count, 512, 0), augment, World.single(), resident(images, CPU))
    per_sample = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    pictures = [Image.fromarray(each.transpose(1, 2, 0)) for each in images.images[0]]

    def lockstep(epochs: int = 10) -> float:
        began = time.perf_counter()
        for epoch in range(epochs):
            for _ in loader.epoch(epoch):
                pass
        return (time.perf_counter() - began) / epochs / count

    def torchvision() -> float:
        began = time.perf_counter()
        for start in range(0, count, 512):
            torch.stack([per_sample(picture) for picture in pictures[start : start + 512]])
        return (time.perf_counter() - began) / count

    seconds = interleave({"torchvision": torchvision, "lockstep": lockstep, "lockstep again": lockstep}, rounds)
    faster = {name: ratio(seconds["torchvision"], seconds[name]) for name in ("lockstep", "lockstep again")}
    noise = ratio(seconds["lockstep again"], seconds["lockstep"])
    speeds = {name: 1 / statistics.median(values) for name, values in seconds.items()}
    rows = [
        ["torchvision, a sample at a time", round(speeds["torchvision"]), None],
        ["Lockstep, order and fetching too", round(speeds["lockstep"]), show(faster["lockstep"])],
        ["the same again", round(speeds["lockstep again"]), show(faster["lockstep again"])],
    ]
    notes = [f"{what}; {rounds} interleaved rounds; again over first: {show(noise)}. Aim: 10 times torchvision's."]
    shown = table(
        "Pad, crop, flip, normalise: 1 thread, batches of 512", ["side", "images/s", "over torchvision"], rows, notes
    )
    return {"images_per_s": speeds, "over_torchvision": faster["lockstep"], "again_over_first": noise, "table": shown}


# ---- a folder of JPEG files


def write_pictures(root: Path, count: int, seed: int = 0) -> float:
    """Pictures of 500x375 pixels whose spectrum falls as a photograph's, in two classes; returns their mean kB."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH))
    amplitude = 1 / np.maximum(frequency, 1 / WIDTH) ** 1.1

    def field() -> np.ndarray[Any, Any]:
        phases = np.exp(2j * np.pi * rng.random(amplitude.shape))
        values = np.fft.irfft2(amplitude * phases, s=(HEIGHT, WIDTH))
        return (values - values.mean()) / values.std()

    sizes = []
    for number in range(count + 2):
        path = root / ("train" if number < count else "val") / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        shared = field()
        pixels = np.stack([128 + 53 * (shared + 0.3 * field()) for _ in range(3)], axis=-1)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        sizes.append(path.stat().st_size / 1e3)
    return statistics.fmean(sizes)


class Files(Dataset[tuple[Tensor, int]]):
    """The same files for a DataLoader; a transform makes the image from a path."""

    def __init__(self, root: Path, transform: Callable[[str], Tensor]) -> None:
        self.files = sorted(str(path) for path in root.rglob("*.jpg"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.files[index]), 0


def by_pillow(path: str) -> Tensor:
    """The usual pipeline: Pillow, and transforms on its image."""
    with Image.open(path) as image:
        return USUAL(image.convert("RGB"))


def by_tensor(path: str) -> Tensor:
    """The quicker one: an image decoded to a tensor, uint8 until the last transform."""
    return _TUNED(decode(Path(path).read_bytes()))


USUAL = transforms.Compose(
    [
        transforms.RandomResizedCrop(SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
_TUNED = v2.Compose(
    [
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)


def _lockstep(root: Path, workers: int) -> Callable[[], Iterable[object]]:
    chosen = DataConfig(dataset="folder", image_size=SIZE, resized_crop=True)
    images, _ = sources.load(chosen, root, 0, World.single())
    augment = Augment(images.mean, images.std, 0, flip=True)
    order, read = Order(len(images), BATCH, 0), streaming(images, CPU, workers)
    epochs = TrainLoader(images, order, augment, World.single(), read).epochs(10**6)
    return lambda: next(epochs)


def _torch(root: Path, workers: int, transform: Callable[[str], Tensor]) -> Callable[[], Iterable[object]]:
    loader = DataLoader(
        Files(root / "train", transform),
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
    )
    return lambda: loader


def _timm(root: Path, workers: int) -> Callable[[], Iterable[object]]:
    from timm.data.dataset_factory import create_dataset
    from timm.data.loader import create_loader

    loader = create_loader(
        create_dataset("", str(root / "train")),
        (3, SIZE, SIZE),
        BATCH,
        is_training=True,
        use_prefetcher=False,
        num_workers=workers,
        persistent_workers=workers > 0,
        color_jitter=None,  # type: ignore[arg-type]
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
    )
    return lambda: loader


LOADERS: dict[str, Callable[[Path, int], Callable[[], Iterable[object]]]] = {
    "Lockstep": _lockstep,
    "Lockstep again": _lockstep,
    "DataLoader, decoded to tensors": lambda root, workers: _torch(root, workers, by_tensor),
    "DataLoader, Pillow": lambda root, workers: _torch(root, workers, by_pillow),
    "timm": _timm,
}


def cpu_seconds() -> float:
    """CPU time so far of this process and all processes below it."""
    ticks, parents = {}, {}
    for stat in _stats():
        pid, fields = int(stat.split(" ", 1)[0]), stat.rpartition(")")[2].split()
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")


def _stats() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield path.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
            continue


def measure_folder(count: int, workers: list[int], rounds: int, epochs: int = 2) -> dict[str, Any]:
    """Images a second and images a second of CPU time, by loader and number of workers."""
    kept: dict[str, Any] = {}
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        kilobytes = write_pictures(Path(scratch), count)
        for number in workers:
            found = _race(Path(scratch), count, number, rounds, epochs)
            ours = found["Lockstep"]
            for name, (wall, cpu) in found.items():
                images_per_s, images_per_cpu_s = 1 / statistics.median(wall), 1 / statistics.median(cpu)
                over = [ratio(wall, ours[0]), ratio(cpu, ours[1])] if name != "Lockstep" else [None, None]
                shown = [show(each) if each else None for each in over]
                rows.append([name, number, round(images_per_s), shown[0], round(images_per_cpu_s), shown[1]])
                kept[f"{name}, {number} workers"] = {
                    "images_per_s": images_per_s,
                    "images_per_cpu_s": images_per_cpu_s,
                    "lockstep_over_it": over[0],
                    "lockstep_over_it_cpu": over[1],
                }
    notes = [
        f"{count} files of {WIDTH}x{HEIGHT} pixels, {kilobytes:.0f} kB on average: noise with a photograph's spectrum. "
        f"Random crops to {SIZE}, flips, normalised; batches of {BATCH}, one thread a process.",
        f"{rounds} interleaved rounds of {epochs} epochs. Files are in the page cache. "
        "timm: create_loader without colour jitter.",
    ]
    columns = ["loader", "workers", "images/s", "Lockstep over it", "images/CPU-s", "Lockstep over it (CPU)"]
    return {"loaders": kept, "table": table("A folder of JPEG files", columns, rows, notes)}


def _race(root: Path, count: int, workers: int, rounds: int, epochs: int) -> dict[str, tuple[list[float], list[float]]]:
    """By loader, wall and CPU seconds an image of each round."""
    spent: dict[str, list[float]] = {}

    def side(name: str, epoch: Callable[[], Iterable[object]]) -> Callable[[], float]:
        def run() -> float:
            cpu, began = cpu_seconds(), time.perf_counter()
            for _ in range(epochs):
                for _batch in epoch():
                    pass
            wall = time.perf_counter() - began
            tick = 1 / os.sysconf("SC_CLK_TCK")  # in which the system counts: less than one is none
            spent.setdefault(name, []).append(max(tick, cpu_seconds() - cpu) / epochs / count)
            return wall / epochs / count

        return run

    found = {}
    for name, make in LOADERS.items():
        try:
            found[name] = side(name, make(root, workers))
        except ModuleNotFoundError as missing:
            print(f"{name}: not measured: {missing}")
    wall = interleave(found, rounds)
    return {name: (wall[name], spent[name][-rounds:]) for name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cifar-images", type=int, default=4096)
    parser.add_argument("--images", type=int, default=256, help="JPEG files to make")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    arrays = measure_cifar(args.data_dir, args.cifar_images, args.rounds)
    files = measure_folder(args.images, args.workers, args.rounds)
    tables = [arrays.pop("table"), files.pop("table")]
    for shown in tables:
        print_table(shown)
    write("data", {"rounds": args.rounds, "cifar": arrays, "folder": files, "tables": tables})


if __name__ == "__main__":
    main()
