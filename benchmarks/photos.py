"""Photos in a folder: the first and the second epoch with and without --decode-size and --cache, beside other loaders.

    python benchmarks/photos.py [--data-dir DIR] [--rounds 7] [--large 128] [--small 512] [--workers 2] [--quick]

JPEG files of 4000x3000 and of 500x375 pixels, made of CIFAR-10's images (random ones where it is absent), enlarged,
with noise and EXIF orientations. Everybody makes random crops to 224, flips and normalises, in batches. Sides take
turns. Writes results/photos.json; --quick takes seconds, and writes nothing.
"""

import argparse
import itertools
import shutil
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interleave, print_table, ratio, show, table, write
from PIL import Image
from torch.utils.data import DataLoader

import data
from lockstep.config import Config, DataConfig, Execution
from lockstep.distributed.world import World
from lockstep.training.assemble import load_data, train_loader

SHORT = 256
LARGE, SMALL = (4000, 3000), (500, 375)
QUICK = {"rounds": 1, "large": 24, "small": 64, "batch": 8}


def write_photos(root: Path, count: int, size: tuple[int, int], data_dir: str) -> float:
    """JPEG files of that width and height in two classes, two more to validate on; returns their mean kB."""
    images, _ = data.cifar(data_dir, 64)
    draws = np.random.default_rng(0)
    noise = (
        draws.normal(0, 5, (size[1] // 2, size[0] // 2, 3)).repeat(2, 0).repeat(2, 1)
    )  # demosaicing leaves it coarse
    noise = np.pad(noise, ((0, size[1] % 2), (0, size[0] % 2), (0, 0)), mode="edge").astype(np.int16)
    exif, sizes = Image.Exif(), []
    for number in range(count + 2):
        path = root / ("train" if number < count else "val") / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(images.images[0][number % 64].transpose(1, 2, 0))
        pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
        moved = np.roll(noise, draws.integers(size[1]), axis=0)
        exif[0x0112] = 1 + number % 8
        Image.fromarray((pixels + moved).clip(0, 255).astype(np.uint8)).save(path, quality=90, exif=exif)
        sizes.append(path.stat().st_size / 1e3)
    return statistics.fmean(sizes)


def config(root: Path, workers: int, decode_size: int, cache: str) -> Config:
    """A run's config as the command line makes it."""
    chosen = DataConfig(
        dataset="folder", image_size=data.SIZE, resized_crop=True, flip=True, decode_size=decode_size, drop_last=False
    )
    execution = Execution(data_dir=str(root), workers=workers, cache=cache)
    return Config(batch_size=data.BATCH, data=chosen, execution=execution)


def sides(root: Path, scratch: Path, workers: int) -> dict[str, Callable[[], float]]:
    """Seconds an image, by side. A first epoch begins with looking for files and starting workers."""
    fresh = (str(scratch / f"cache{number}") for number in itertools.count())

    def loaded(decode_size: int, cache: str) -> Callable[[], Iterator[object]]:
        asked = config(root, workers, decode_size, cache)
        train, _ = load_data(asked, World.single())
        epochs = train_loader(asked, train, World.single()).epochs(10**6)
        return lambda: iter(next(epochs))

    def timed(epoch: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            seen = sum(len(batch[0] if isinstance(batch, list | tuple) else batch.images) for batch in epoch())
            return (time.perf_counter() - began) / seen

        return run

    def first(decode_size: int, cached: bool) -> Callable[[], float]:
        def run() -> float:
            cache = next(fresh) if cached else ""
            found = timed(lambda: loaded(decode_size, cache)())()
            shutil.rmtree(cache, ignore_errors=True)
            return found

        return run

    found = {
        "Lockstep, as stored": timed(loaded(0, "")),
        f"--decode-size {SHORT}": timed(loaded(SHORT, "")),
        f"--decode-size {SHORT} --cache": timed(loaded(SHORT, next(fresh))),
        f"first epoch, --decode-size {SHORT}": first(SHORT, False),
        f"first epoch, --decode-size {SHORT} --cache": first(SHORT, True),
        "DataLoader, Pillow": timed(data.LOADERS["DataLoader, Pillow"](root, workers)),
    }
    for name, make in (("timm", data.LOADERS["timm"]), ("webdataset", shards)):
        try:
            found[name] = timed(make(root, workers))
        except ModuleNotFoundError as missing:
            print(f"{name}: not measured: {missing}")
    return found


def shards(root: Path, workers: int) -> Callable[[], Iterator[object]]:
    """The training files in tar files, two for each worker, read by webdataset with the usual transforms."""
    import webdataset

    files = sorted(file for file in (root / "train").rglob("*.jpg"))
    names = []
    for number in range(2 * max(1, workers)):
        names.append(str(root / f"{number}.tar"))
        with tarfile.open(names[-1], "w") as tar:
            for file in files[number :: 2 * max(1, workers)]:
                tar.add(file, f"{file.stem}.jpg")
    found = (
        webdataset.WebDataset(names, shardshuffle=len(names), seed=0, workersplitter=webdataset.split_by_worker)
        .shuffle(1000, seed=0)
        .decode("pil")
        .to_tuple("jpg")
        .map_tuple(data.USUAL)
        .batched(data.BATCH)
    )
    loader = DataLoader(
        found,
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
    )
    return lambda: iter(loader)


def measure(size: tuple[int, int], count: int, workers: int, rounds: int, data_dir: str) -> dict[str, Any]:
    """Images a second of all sides on files of one size, and what a kept picture is faster by."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "photos"
        kilobytes = write_photos(root, count, size, data_dir)
        seconds = interleave(sides(root, Path(scratch), workers), rounds)
    kept = seconds[f"--decode-size {SHORT} --cache"]
    without, with_it = (seconds[f"first epoch, --decode-size {SHORT}{more}"] for more in ("", " --cache"))
    first = ratio(with_it, without)
    rows = [
        [name, round(1 / statistics.median(spent), 1), show(ratio(spent, kept)) if spent is not kept else None]
        for name, spent in seconds.items()
    ]
    notes = [
        f"{count} files of {size[0]}x{size[1]} pixels, {kilobytes:,.0f} kB on average, in the page cache. {workers} "
        f"worker processes, one thread each; batches of {data.BATCH}; {rounds} interleaved rounds.",
        "First epochs include the search for files and the workers' start. "
        f"Time with the cache over time without it: {show(first)}.",
    ]
    title = f"Photos of {size[0]}x{size[1]} pixels"
    return {
        "images_per_s": {name: 1 / statistics.median(spent) for name, spent in seconds.items()},
        "kept_over": {name: ratio(spent, kept) for name, spent in seconds.items() if spent is not kept},
        "first_epoch_with_cache_over_without": first,
        "table": table(title, ["side", "images/s", "a kept picture is faster by"], rows, notes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", type=int, default=128, help="files of 12 megapixels to make")
    parser.add_argument("--small", type=int, default=512, help="files of 500x375 pixels to make")
    parser.add_argument("--batch", type=int, default=data.BATCH)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a look at it: no result is written")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()
    torch.set_num_threads(1)
    data.BATCH = args.batch
    found = {
        name: measure(size, count, args.workers, args.rounds, args.data_dir)
        for name, size, count in (("12 megapixels", LARGE, args.large), ("500x375", SMALL, args.small))
    }
    tables = [each.pop("table") for each in found.values()]
    for shown in tables:
        print_table(shown)
    if not args.quick:
        write("photos", {"rounds": args.rounds, "photos": found, "tables": tables})


if __name__ == "__main__":
    main()
