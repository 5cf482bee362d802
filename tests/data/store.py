"""Shards as webdataset writes them, and an HTTP server of ranges that can be told to fail."""

import hashlib
import io
import json
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


def write_set(root: Path, shards: int = 5, each: int = 8, ending: str = "cls") -> Path:
    """train-00000k.tar of uneven sizes, and one val-000000.tar, with labels 0 to 2, or their names."""
    number = 0
    for shard in range(shards):
        labels = [CLASSES[k % 3] if ending == "json" else k % 3 for k in range(number, number + each + shard % 3)]
        write_shard(root / f"train-{shard:06}.tar", labels, number, ending)
        number += len(labels)
    labels = [CLASSES[k % 3] if ending == "json" else k % 3 for k in range(9)]
    write_shard(root / "val-000000.tar", labels, 1000, ending)
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
    """A server of the files below a folder."""
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
