"""Shards: what a run over an index of ImageNet's shape takes to start, and images a second beside other loaders.

    python benchmarks/shards.py [--samples 1281167] [--shards 1282] [--images 2000] [--workers 2] [--rounds 5]
        [--link MS]

The index is made up over a few real shards, which stand there under many names. The start is measured in a process of
its own: seconds and memory from the import on until the first and a middle batch of an epoch are known. For the speed,
the same JPEGs of 500x375 pixels are decoded, cropped and resized by the same functions on all sides: webdataset's, and
from the disk LitData's and Streaming's in their own formats, where they are installed. `--link`: from a local HTTP
server, each answer so many ms late. Prints its tables, writes no file.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from common import interleave, print_table, ratio, show, table
from torch import Tensor
from torch.utils.data import DataLoader

from data import write_pictures
from lockstep.config import DataConfig
from lockstep.data import sources
from lockstep.data.decoding import decode
from lockstep.data.loaders import streaming
from lockstep.data.order import Order, Windows
from lockstep.data.picture_set import centre_crop
from lockstep.data.remote import PieceCache
from lockstep.data.shard_index import build, write_index
from lockstep.data.shards import ShardSet, find_parts
from lockstep.distributed.world import World

_PROBE = """
import sys, time, json
from pathlib import Path
from lockstep.config import DataConfig
from lockstep.data import sources
from lockstep.data.order import Order, Windows
from lockstep.distributed.world import World
def private(): return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 2**10
before, began = private(), time.perf_counter()
train, _ = sources.load(DataConfig(dataset=sys.argv[1], shuffle_window=int(sys.argv[2])), Path("."), 0, World.single())
loaded = time.perf_counter() - began
train.fingerprint
windows = Windows(train.source.shard_sizes, int(sys.argv[2]), 0) if int(sys.argv[2]) else None
order = Order(len(train), 256, 0, windows=windows)
began_order = time.perf_counter()
order.step(7, 0); order.step(7, order.steps_per_epoch // 2)
ordered = time.perf_counter() - began_order
train.source.read(len(train) // 2)
print(json.dumps([len(train), loaded, time.perf_counter() - began, ordered, private() - before]))
"""


def made_up(root: Path, samples: int, shards: int) -> None:
    """Shards under many names, which are a few files, and an index over them, of so many samples."""
    each, few = -(-samples // shards), 4
    rng = np.random.default_rng(0)
    for number in range(few):
        with webdataset.TarWriter(str(root / f"real-{number}.tar"), encoder=False) as out:
            for k in range(each):
                out.write({"__key__": f"n{k % 1000:08}/{k:08}", "jpg": rng.bytes(700), "cls": str(k % 1000).encode()})
    for split, count in (("train", shards), ("val", 4)):
        for number in range(count):
            os.link(root / f"real-{number % few}.tar", root / f"{split}-{number:06}.tar")
    for number in range(few):
        (root / f"real-{number}.tar").unlink()
    whole, _ = find_parts(f"shards:{root}", Path())
    for split, listed in whole.items():
        few_names, _ = find_parts(f"shards:{root}/{split}-{{000000..{few - 1:06}}}.tar", Path())
        index = build(few_names["train"], 4, lambda *_: None)
        parts = [index.rows(k % few) for k in range(len(listed.names))]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        arrays["key_starts"] = np.append(0, np.cumsum([len(part["keys"]) for part in parts]))
        arrays["page_starts"] = np.zeros(len(parts) + 1, np.int64)
        rows = [(name, *index.shards[k % few][1:]) for k, name in enumerate(listed.names)]
        write_index(listed.places[0], arrays, rows, ())


def measure_start(samples: int, shards: int, rounds: int) -> None:
    """Seconds and memory of a start."""
    with tempfile.TemporaryDirectory() as folder:
        made_up(Path(folder), samples, shards)
        size = max(path.stat().st_size for path in Path(folder).glob(".lockstep-*")) / 1e6
        rows: list[list[Any]] = []
        for window in (0, 8):
            found = []
            for _ in range(rounds):
                argv = [sys.executable, "-c", _PROBE, f"shards:{folder}", str(window)]
                found.append(json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout))
            count, *figures = (statistics.median(column) for column in zip(*found, strict=True))
            loaded, ready, ordered, private = figures
            rows.append(
                [
                    f"window {window}",
                    f"{count:,.0f}",
                    round(loaded, 2),
                    round(ready, 2),
                    round(ordered * 1e3, 1),
                    round(private, 1),
                ]
            )
        head = [
            "order",
            "samples",
            "sets, s",
            "first picture, s",
            "two batches of ids, ms",
            "memory beside the map, MiB",
        ]
        print_table(
            table(f"Start over an index of {size:.0f} MB, {shards:,} shards", head, rows, [f"median of {rounds}"])
        )


# ---- images a second


def _sample(data: bytes) -> Tensor:
    return centre_crop(decode(data), 224, 224 / 256)


def _pair(sample: dict[str, Any]) -> tuple[Tensor, int]:
    return _sample(sample["jpg"]), int(sample["cls"])


def write_shards(root: Path, count: int, each: int = 50) -> list[bytes]:
    """JPEGs of 500x375 pixels in shards; returns their files, which come again and again."""
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), min(count, 200))
        files = [path.read_bytes() for path in sorted(Path(folder).rglob("train/*/*.jpg"))]
    for split, total in (("train", count), ("val", 2)):
        with webdataset.ShardWriter(str(root / f"{split}-%06d.tar"), maxcount=each, encoder=False, verbose=0) as out:
            for k in range(total):
                out.write({"__key__": f"{k:08}", "jpg": files[k % len(files)], "cls": str(k % 2).encode()})
    return files


KEPT: dict[str, Any] = {
    "prefetch_factor": 4,
    "persistent_workers": True,
}  # the first epoch, which starts them, is left out


def _decoded(sample: dict[str, Any]) -> tuple[Tensor, int]:
    return _sample(sample["jpg"]), int(sample["cls"])


def litdata_loader(root: Path, files: list[bytes], count: int, workers: int) -> Iterable[Any]:
    """LitData's loader over its own format, in chunks as long as the shards."""
    import litdata
    from litdata.streaming.writer import BinaryWriter

    class Pictures(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            return _decoded(super().__getitem__(index))

    writer = BinaryWriter(str(root), chunk_size=50)
    for k in range(count):
        writer[k] = {"jpg": files[k % len(files)], "cls": k % 2}
    writer.done()
    writer.merge()
    found = Pictures(str(root), shuffle=True, seed=0)
    loader: Iterable[Any] = litdata.StreamingDataLoader(found, batch_size=32, num_workers=workers, **KEPT)
    return loader


def streaming_loader(root: Path, files: list[bytes], count: int, workers: int) -> Iterable[Any]:
    """Streaming's loader over its own format, in shards as long as ours."""
    from streaming import MDSWriter, StreamingDataset

    class Pictures(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            return _decoded(super().__getitem__(index))

    limit = 50 * sum(map(len, files)) // len(files)
    with MDSWriter(out=str(root), columns={"jpg": "bytes", "cls": "int"}, size_limit=limit) as out:
        for k in range(count):
            out.write({"jpg": files[k % len(files)], "cls": k % 2})
    found = Pictures(local=str(root), shuffle=True, shuffle_seed=0, batch_size=32)
    return DataLoader(found, 32, num_workers=workers, **KEPT)


def measure_speed(count: int, workers: int, rounds: int, link_ms: float) -> None:
    """Images a second over one epoch, workers started beforehand."""
    from tests.data.store import serving  # the server of the tests

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as store:
        files = write_shards(Path(folder), count)
        store.slow_s = link_ms / 1e3
        base = store.address if link_ms else folder
        shards = -(-count // 50)
        urls = f"{base}/train-{{000000..{shards - 1:06}}}.tar"
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"

        def lockstep(window: int) -> float:
            name = f"shards:{urls}:val={base}/val-000000.tar"
            train, _ = sources.load(DataConfig(dataset=name, shuffle_window=window), Path(), 0, World.single())
            assert isinstance(train, ShardSet)
            train.source.cache = PieceCache(Path(tempfile.mkdtemp(dir=folder)), 1 << 34)
            windows = Windows(train.source.shard_sizes, window, 0) if window else None
            order = Order(count, 32, 0, windows=windows)
            read = streaming(train, torch.device("cpu"), workers)
            next(read(iter([(np.arange(32), None)])))
            began = time.perf_counter()
            seen = sum(len(labels) for _, labels, _ in read((ids, 0) for ids in order.steps(0)))
            assert seen == count
            return (time.perf_counter() - began) / count

        source = urls if not link_ms else f"pipe:curl -s -f {urls}"
        found = webdataset.WebDataset(source, shardshuffle=shards, nodesplitter=None, seed=0).shuffle(1000)
        loader = DataLoader(found.map(_pair), 32, num_workers=workers, **KEPT)

        def theirs() -> float:
            began = time.perf_counter()
            seen = sum(len(labels) for _, labels in loader)
            assert seen == count
            return (time.perf_counter() - began) / count

        def other(make: Callable[..., Iterable[Any]], name: str) -> Callable[[], float]:
            (root := Path(folder, name)).mkdir()
            loader = make(root, files, count, workers)

            def run() -> float:
                began = time.perf_counter()
                assert sum(len(labels) for _, labels in loader) == count
                return (time.perf_counter() - began) / count

            return run

        sides: dict[str, Callable[[], float]] = {"webdataset": theirs, "window 8": lambda: lockstep(8)}
        sides["no window"] = lambda: lockstep(0)
        peers = {} if link_ms else {"LitData": litdata_loader, "Streaming": streaming_loader}
        for name, make in peers.items():
            try:
                sides[name] = other(make, name)
            except ModuleNotFoundError as missing:
                print(f"{name}: not measured: {missing}")
        seconds = interleave(sides, rounds)
        rows = [
            [name, round(1 / statistics.median(values)), show(ratio(seconds["webdataset"], values))]
            for name, values in seconds.items()
        ]
        note = f"{count:,} JPEGs of 500x375, {workers} workers, {rounds} rounds"
        print_table(
            table(
                f"Images a second, {'from the disk' if not link_ms else f'{link_ms:g} ms away'}",
                ["side", "images/s", "over webdataset"],
                rows,
                [note],
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--shards", type=int, default=1282)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", type=float, default=0.0)
    chosen = parser.parse_args()
    if chosen.samples:
        measure_start(chosen.samples, chosen.shards, chosen.rounds)
    if chosen.images:
        measure_speed(chosen.images, chosen.workers, chosen.rounds, chosen.link)


if __name__ == "__main__":
    main()
