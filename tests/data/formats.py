"""Small files in the official formats, with their checksums, and a local server to fetch them from."""

import dataclasses
import gzip
import hashlib
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.config import DataConfig
from lockstep.data.official import Official
from lockstep.data.picture_set import Files, PictureSet
from lockstep.data.sources import load
from lockstep.distributed.world import World

ALONE = World.single()
Pair = tuple[PictureSet, PictureSet]


def write_idx(path: Path, array: np.ndarray) -> None:
    """An IDX file of unsigned bytes: 0, 0, 8, dimensions, big-endian sizes, bytes in C order."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def write_records(path: Path, images: np.ndarray, *labels: np.ndarray) -> None:
    """CIFAR's binary version: a byte for each kind of label, then the pixels, for every image."""
    columns = [np.asarray(kind, np.uint8)[:, None] for kind in labels]
    path.write_bytes(np.hstack([*columns, images.reshape(len(images), -1)]).astype(np.uint8).tobytes())


def samples(data: Official, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *data.shape), dtype=np.uint8)
    return images, rng.integers(0, len(data.classes), count, dtype=np.uint8)


def write_official(data: Official, root: Path, per_file: int = 7) -> tuple[Official, dict[str, tuple[np.ndarray, ...]]]:
    """All files of a set, small ones; returns the set with their sizes and sums, and split -> (images, labels)."""
    folder = root / data.folder
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, tuple[np.ndarray, ...]] = {}
    for split, names in (("train", data.train), ("test", data.test)):
        if not data.label_bytes:
            images, labels = samples(data, per_file + len(split))
            write_idx(folder / names[0], images[:, 0])
            write_idx(folder / names[1], labels)
        else:
            parts = [samples(data, per_file + i, seed=i + len(split)) for i in range(len(names))]
            for name, (pixels, fine) in zip(names, parts, strict=True):
                coarse = [np.full(len(fine), 99)] * (data.label_bytes - 1)  # a wrong label, to be passed over
                write_records(folder / name, pixels, *coarse, fine)
            images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        contents[split] = (images, labels.astype(np.int64))
    return resummed(data, root), contents


def resummed(data: Official, root: Path) -> Official:
    """The set with the sizes and sums of the files that lie below root now."""
    folder = root / data.folder
    files = {name: (len(raw), md5(raw)) for name in data.files for raw in [(folder / name).read_bytes()]}
    return dataclasses.replace(data, files=files)


def md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def pack(data: Official, root: Path, into: Path) -> Official:
    """Move the set's files from root into packages in `into`; returns the set with the packages' sums."""
    folder, packages = root / data.folder, {}
    into.mkdir(parents=True, exist_ok=True)
    for package, (_, names) in data.packages.items():
        target = into / package
        if package.endswith(".tar.gz"):
            with tarfile.open(target, "w:gz") as tar:
                for name in names:
                    tar.add(folder / name, f"{data.folder}/{name}")
        else:
            with gzip.open(target, "wb") as file:
                file.write((folder / names[0]).read_bytes())
        for name in names:
            (folder / name).unlink()
        packages[package] = (md5(target.read_bytes()), names)
    return dataclasses.replace(data, packages=packages)


def mirrored(data: Official, *mirrors: str) -> Official:
    return dataclasses.replace(data, mirrors=mirrors)


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder on this machine; yields the address and the paths got so far."""
    got: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            if self.command == "GET":
                got.append(self.path.lstrip("/"))

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_port}/", got
        finally:
            httpd.shutdown()
            thread.join()


def write_folders(
    root: Path, classes: tuple[str, ...] = ("bee", "ant"), count: int = 3, suffixes: tuple[str, ...] = (".png", ".jpg")
) -> None:
    """Class folders of smooth random images of several sizes below root/train and root/val."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                side = (40 + 7 * i, 60 - 5 * i)
                coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
                coarse.resize(side, Image.Resampling.BICUBIC).save(
                    root / split / name / f"{i}{suffixes[i % len(suffixes)]}"
                )


def picture_sets(dataset: str, root: Path, seed: int = 0, world: World = ALONE, **data: Any) -> Pair:
    """The pictures of a set to train and to validate on."""
    train, val = load(DataConfig(dataset=dataset, **data), root, seed, world)
    assert isinstance(train, PictureSet)
    assert isinstance(val, PictureSet)
    return train, val


def folder_sets(root: Path, size: int, seed: int = 0, **data: Any) -> Pair:
    """Those of class folders."""
    return picture_sets("folder", root, seed, image_size=size, **data)


def path_of(images: PictureSet, sample: int) -> Path:
    assert isinstance(images.source, Files)
    return images.source.path(sample)


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}
