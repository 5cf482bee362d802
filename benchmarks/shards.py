"""Shards: what a run over an index of ImageNet's shape takes to start, and images a second beside other loaders.

    python benchmarks/shards.py [--samples 1281167] [--shards 1282] [--images 2000] [--workers 2] [--rounds 5]
        [--link MS] [--rate MBIT]

The index is made up over a few real shards, which stand there under many names. The start is measured in a process of
its own: seconds and memory from the import on until the first and a middle batch of an epoch are known. For the speed,
the same JPEGs of 500x375 pixels are decoded, cropped and resized by the same functions on all sides: webdataset's, and
LitData's and Streaming's in their own formats, where they are installed. `--link`: over a link between two network
namespaces (root alone may make them) that carries `--rate` Mbit/s, from a static HTTP server whose every answer is so
many ms late; every epoch is read anew. LitData, which has no http of its own, fetches whole files by a
downloader of ours; Streaming takes none. Prints its tables, writes no file.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from common import interleave, print_table, ratio, show, table
from namespaces import Host, missing, two_hosts
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

_SERVER = """
import asyncio
import sys
from aiohttp import web
@web.middleware
async def late(request, handler):
    await asyncio.sleep(float(sys.argv[3]) / 1e3)
    return await handler(request)
app = web.Application(middlewares=[late])
app.router.add_static("/", sys.argv[1])
web.run_app(app, host=sys.argv[2], port=8000, print=None, access_log=None)
"""


def across(mbit: float) -> int:
    """This command again, at one end of such a link; its exit code."""
    with two_hosts(mbit) as link:
        here, there = link.hosts
        environ = os.environ | {"BENCHMARK_HOSTS": f"{here.name} {there.name} {there.address}"}
        return subprocess.run([*here.prefix, sys.executable, *sys.argv], env=environ).returncode


@contextmanager
def served(root: Path, late_ms: float) -> Iterator[str]:
    """A server of a folder's files at the link's other end; its address."""
    _, name, address = os.environ["BENCHMARK_HOSTS"].split()
    command = [*Host(name, address).prefix, sys.executable, "-c", _SERVER, str(root), address, str(late_ms)]
    with subprocess.Popen(command) as server:
        try:
            url = f"http://{address}:8000"
            for _ in range(600):
                with suppress(OSError), urllib.request.urlopen(f"{url}/val-000000.tar"):
                    break
                time.sleep(0.1)
            yield url
        finally:
            server.kill()


def received() -> int:
    """Bytes that have come over the link; 0 without one."""
    device = os.environ.get("BENCHMARK_HOSTS", "").partition(" ")[0]
    return int(Path(f"/sys/class/net/{device}/statistics/rx_bytes").read_text()) if device else 0


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


def litdata_loader(root: Path, files: list[bytes], count: int) -> Callable[[str, int], Iterable[Any]]:
    """LitData's loaders over its own format, in chunks as long as the shards."""
    import litdata
    from litdata.streaming.downloader import LocalDownloader, register_downloader
    from litdata.streaming.writer import BinaryWriter

    class Pictures(litdata.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            return _decoded(super().__getitem__(index))

    class Http(LocalDownloader):  # type: ignore[misc]
        def download_file(self, remote_filepath: str, local_filepath: str) -> None:
            if not Path(local_filepath).exists():
                with urllib.request.urlopen(remote_filepath.replace("s3:", "http:")) as answer:
                    Path(f"{local_filepath}.tmp").write_bytes(answer.read())
                Path(f"{local_filepath}.tmp").rename(local_filepath)
            self._notify_published(local_filepath)

    register_downloader("s3://", Http, overwrite=True)  # it takes no address that begins with http
    writer = BinaryWriter(str(root), chunk_size=50)
    for k in range(count):
        writer[k] = {"jpg": files[k % len(files)], "cls": k % 2}
    writer.done()
    writer.merge()
    fresh = itertools.count()

    def make(url: str, workers: int) -> Iterable[Any]:
        cache = {"cache_dir": f"{root}-cache-{next(fresh)}"} if url.startswith("http") else {}
        found = Pictures(url.replace("http:", "s3:"), shuffle=True, seed=0, **cache)
        loader: Iterable[Any] = litdata.StreamingDataLoader(found, batch_size=32, num_workers=workers, **KEPT)
        return loader

    return make


def streaming_loader(root: Path, files: list[bytes], count: int) -> Callable[[str, int], Iterable[Any]]:
    """Streaming's loaders over its own format, in shards as long as ours."""
    from streaming import MDSWriter, StreamingDataset

    class Pictures(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            return _decoded(super().__getitem__(index))

    limit = 50 * sum(map(len, files)) // len(files)
    with MDSWriter(out=str(root), columns={"jpg": "bytes", "cls": "int"}, size_limit=limit) as out:
        for k in range(count):
            out.write({"jpg": files[k % len(files)], "cls": k % 2})

    def make(url: str, workers: int) -> Iterable[Any]:
        found = Pictures(local=url, shuffle=True, shuffle_seed=0, batch_size=32)
        return DataLoader(found, 32, num_workers=workers, **KEPT)

    return make


def measure_speed(count: int, workers: int, rounds: int, link_ms: float, mbit: float) -> None:
    """Images a second over one epoch, by workers that have done one before; LitData's over a link begin anew."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        files = write_shards(Path(folder), count)
        made: dict[str, Callable[[str, int], Iterable[Any]]] = {}
        peers = {"LitData": litdata_loader} | ({} if link_ms else {"Streaming": streaming_loader})
        for name, write in peers.items():
            (root := Path(folder, name)).mkdir()
            try:
                made[name] = write(root, files, count)
            except ModuleNotFoundError as missing_module:
                print(f"{name}: not measured: {missing_module}")
        base = stack.enter_context(served(Path(folder), link_ms)) if link_ms else folder
        shards = -(-count // 50)
        urls = f"{base}/train-{{000000..{shards - 1:06}}}.tar"
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        carried: dict[str, list[float]] = {}

        def timed(name: str, batches: Callable[[], Iterable[Any]]) -> float:
            before, began = received(), time.perf_counter()
            assert sum(len(batch[1]) for batch in batches()) == count
            seconds = time.perf_counter() - began
            carried.setdefault(name, []).append((received() - before) * 8e-6 / seconds)
            return seconds / count

        def lockstep(window: int) -> Callable[[], float]:
            name = f"shards:{urls}:val={base}/val-000000.tar"
            train, _ = sources.load(DataConfig(dataset=name, shuffle_window=window), Path(), 0, World.single())
            assert isinstance(train, ShardSet)
            train.source.cache = cache = PieceCache(Path(folder, f"pieces-{window}"), 1 << 34)
            windows = Windows(train.source.shard_sizes, window, 0) if window else None
            order, read, epochs = Order(count, 32, 0, windows=windows), None, itertools.count()

            def run() -> float:
                nonlocal read
                shutil.rmtree(cache.folder, ignore_errors=True)
                read, epoch = read or streaming(train, torch.device("cpu"), workers), next(epochs)
                return timed(f"window {window}", lambda: read((ids, epoch) for ids in order.steps(epoch)))

            return run

        source = urls if not link_ms else f"pipe:curl -s -f {urls}"
        found = webdataset.WebDataset(source, shardshuffle=shards, nodesplitter=None, seed=0).shuffle(1000)
        loader = DataLoader(found.map(_pair), 32, num_workers=workers, **KEPT)

        def other(name: str, make: Callable[[str, int], Iterable[Any]]) -> Callable[[], float]:
            kept = None if link_ms else make(f"{folder}/{name}", workers)
            return lambda: timed(name, lambda: kept or make(f"{base}/{name}", workers))

        sides = {"webdataset": lambda: timed("webdataset", lambda: loader)}
        sides |= {"window 8": lockstep(8), "window 0": lockstep(0)}
        sides |= {name: other(name, make) for name, make in made.items()}
        seconds = interleave(sides, rounds)
        rows = [
            [
                name,
                round(1 / statistics.median(values)),
                show(ratio(seconds["webdataset"], values)),
                *([round(statistics.median(carried[name][1:]))] if link_ms else []),
            ]
            for name, values in seconds.items()
        ]
        where = f"{link_ms:g} ms and {mbit:g} Mbit/s away" if link_ms else "from the disk"
        head = ["side", "images/s", "over webdataset", *(["Mbit/s"] if link_ms else [])]
        note = (
            f"{count:,} JPEGs of {sum(map(len, files)) / len(files) / 1e3:.0f} kB, {workers} workers, {rounds} rounds"
        )
        print_table(table(f"Images a second, {where}", head, rows, [note]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--shards", type=int, default=1282)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=1000.0)
    chosen = parser.parse_args()
    if chosen.link and "BENCHMARK_HOSTS" not in os.environ:
        sys.exit(missing() or across(chosen.rate))
    if chosen.samples:
        measure_start(chosen.samples, chosen.shards, chosen.rounds)
    if chosen.images:
        measure_speed(chosen.images, chosen.workers, chosen.rounds, chosen.link, chosen.rate)


if __name__ == "__main__":
    main()
