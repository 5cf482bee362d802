"""Shards as webdataset writes them, and an HTTP server of ranges that can be told to fail."""

import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from PIL import Image

from tests.data.photos import encoded, photo

CLASSES = ("ant", "bee", "cat")


def picture(label: int, number: int, kind: str = "JPEG") -> bytes:
    """A small picture, whose brightness tells its label."""
    pixels = np.asarray(photo(20 + number % 3, 18, number)).astype(np.int16) // 2 + 50 * label
    return encoded(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), kind)


def write_shard(path: Path, labels: list[Any], first: int = 0, ending: str = "cls") -> None:
    """A shard by webdataset's own writer: a picture for each label, which stands in a .cls or a .json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with webdataset.TarWriter(buffer, encoder=False) as out:
        for number, label in enumerate(labels, first):
            held = json.dumps({"label": label}) if ending == "json" else str(label)
            kind = ("jpg", "JPEG") if number % 4 else ("png", "PNG")
            place = label if isinstance(label, int) else CLASSES.index(label)
            sample = {"__key__": f"n{number // 7:03}/{number:05}", kind[0]: picture(place % 3, number, kind[1])}
            out.write({**sample, ending: held.encode()})
    path.write_bytes(buffer.getvalue())


def parts(shards: int, each: int, by_class: bool) -> Iterator[tuple[int, int, list[int]]]:
    """Each shard's number (the last one, to validate on: -1), its first picture's, and labels from 0 to 2."""
    number = 0
    for shard in range(shards):
        numbers = range(number, number := number + each + shard % 3)
        yield shard, numbers.start, [min(k // 15, 2) if by_class else k % 3 for k in numbers]
    yield -1, 1000, [k // 3 if by_class else k % 3 for k in range(9)]


def write_set(root: Path, shards: int = 5, each: int = 8, ending: str = "cls", by_class: bool = False) -> Path:
    """train-00000k.tar of uneven sizes, and one val-000000.tar, with labels 0 to 2, or their names."""
    for shard, first, labels in parts(shards, each, by_class):
        held: list[Any] = [CLASSES[label] for label in labels] if ending == "json" else labels
        write_shard(root / (f"train-{shard:06}.tar" if shard >= 0 else "val-000000.tar"), held, first, ending)
    return root


def write_folder(root: Path, shards: int = 5, each: int = 8) -> Path:
    """The pictures of `write_set` by class, in the same order, in class folders."""
    for shard, first, labels in parts(shards, each, True):
        for number, label in enumerate(labels, first):
            ending, kind = ("jpg", "JPEG") if number % 4 else ("png", "PNG")
            path = root / ("train" if shard >= 0 else "val") / str(label) / f"{number:05}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(label, number, kind))
    return root


@dataclass
class Store:
    """What the server has, and what it does wrong. `fault`: of a GET by its path and its number, a kind below."""

    root: Path
    address: str = ""
    fault: Callable[[str, int], str] = lambda path, number: ""
    gets: list[tuple[str, str]] = field(default_factory=list)  # path and range
    slow_s: float = 0.0  # before every answer

    def body(self, path: str) -> bytes:
        """A file's bytes."""
        return (self.root / path.lstrip("/")).read_bytes()


FAULTS = ("503", "reset", "cut", "short", "wrong", "whole", "late")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer("")

    def do_GET(self) -> None:
        self.store.gets.append((self.path, self.headers.get("Range", "")))
        self._answer(self.store.fault(self.path, len(self.store.gets)))

    def _answer(self, fault: str) -> None:
        time.sleep(self.store.slow_s)
        folder = self.store.root / self.path.strip("/")
        if folder.is_dir():
            names = sorted(each.name + "/" * each.is_dir() for each in folder.iterdir())
            return self._send(200, "".join(f'<a href="{name}">{name}</a>\n' for name in names).encode(), {})
        try:
            data = self.store.body(self.path)
        except OSError:
            return self._send(404, b"", {})
        if fault == "503":
            return self._send(503, b"busy", {})
        if fault == "reset":
            self.close_connection = True
            return self.connection.close()
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        start, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if not start or fault == "whole":
            return self._send(200, data, headers)
        first, last = int(start), min(int(end), len(data) - 1)
        part = data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        if fault == "late":
            time.sleep(2.0)
        if fault == "wrong":
            part = bytes(byte ^ 0x5A for byte in part)
        if fault == "short":
            part = part[:-1]
        return self._send(206, part, headers, len(part) // 2 if fault == "cut" else None)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], sent: int | None = None) -> None:
        with suppress(ConnectionError):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "text/html"}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if sent is None else body[:sent])
            if sent is not None:
                self.close_connection = True


@contextmanager
def serving(root: Path) -> Iterator[Store]:
    store = Store(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": store}))
    server.daemon_threads, server.block_on_close = True, False
    store.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


_S3 = """
import os
import sys
from pathlib import Path
import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(port=0, verbose=False)
server.start()
address = "http://{}:{}".format(*server.get_host_and_port())
store, root = boto3.client("s3", endpoint_url=address), Path(sys.argv[1])
store.create_bucket(Bucket="photos")
for file in root.rglob("*"):
    if file.is_file():
        store.upload_file(str(file), "photos", str(file.relative_to(root)))
print(address, flush=True)
sys.stdin.read()
os._exit(0)  # the server's threads
"""


@contextmanager
def serving_s3(root: Path) -> Iterator[dict[str, str]]:
    """An S3 server with the files below a folder in its bucket "photos"; the environment that finds it."""
    environ = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_DEFAULT_REGION": "us-east-1"}
    started = subprocess.Popen(
        [sys.executable, "-c", _S3, str(root)], env={**os.environ, **environ},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with started:
        assert started.stdout
        yield {**environ, "AWS_ENDPOINT_URL": started.stdout.readline().strip()}
        started.communicate()
