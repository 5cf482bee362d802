"""What is put on which stream, in which order; and on a GPU, that the batches are the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data import loaders as module
from lockstep.data.augment import Augment
from lockstep.data.image_sets import ArraySet
from lockstep.data.loaders import TrainLoader, prefetch, resident, streaming
from lockstep.data.order import Order
from lockstep.distributed.world import World

CPU = torch.device("cpu")


@dataclass
class FakeStream:
    """Notes what it is asked for, and is the current one inside its `with`."""

    name: str
    log: list[Any]
    current: list[str]

    def __enter__(self) -> None:
        self.current.append(self.name)

    def __exit__(self, *error: object) -> None:
        self.current.pop()

    def record_event(self) -> str:
        made = [word for what, word in self.log if what == "made"]
        return f"ready {made[-1]}"

    def wait_event(self, event: str) -> None:
        self.log.append((f"{self.name} waits for", event))

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append((f"{self.name} waits for", other.name))


@dataclass
class FakeTensor:
    number: int
    log: list[Any]

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append((f"kept for {stream.name}", self.number))


def run(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[list[Any], list[int]]:
    log: list[Any] = []
    current = ["main"]
    main, side = FakeStream("main", log, current), FakeStream("side", log, current)
    monkeypatch.setattr(module, "_side", lambda device: side)
    monkeypatch.setattr(module, "_current", lambda device: main)

    def made() -> Iterator[Any]:
        for number in range(count):
            assert current[-1] == "side", "a batch is prepared on the side stream"
            log.append(("made", number))
            yield (FakeTensor(number, log),)

    seen = []
    for (tensor,) in prefetch(made(), torch.device("cuda:0")):
        assert current == ["main"], "training goes on where it was"
        log.append(("step", tensor.number))  # type: ignore[attr-defined]
        seen.append(tensor.number)  # type: ignore[attr-defined]
    return log, seen


def test_a_batch_is_prepared_before_the_step_on_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = run(monkeypatch, 3)
    assert log == [
        ("side waits for", "main"),
        ("made", 0),
        ("made", 1),
        ("main waits for", "ready 0"),
        ("kept for main", 0),
        ("step", 0),
        ("made", 2),
        ("main waits for", "ready 1"),
        ("kept for main", 1),
        ("step", 1),
        ("main waits for", "ready 2"),
        ("kept for main", 2),
        ("step", 2),
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_each_batch_comes_once_and_in_order(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    assert run(monkeypatch, count)[1] == list(range(count))


def test_without_streams_nothing_is_taken_early() -> None:
    taken = []

    def made() -> Iterator[tuple[torch.Tensor, ...]]:
        for number in range(3):
            taken.append(number)
            yield (torch.tensor(number),)

    for number, (tensor,) in enumerate(prefetch(made(), CPU)):
        assert tensor.item() == number
        assert taken == list(range(number + 1))


def test_an_error_in_preparing_comes_through_and_leaves_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    current = ["main"]
    side = FakeStream("side", [], current)
    monkeypatch.setattr(module, "_side", lambda device: side)
    monkeypatch.setattr(module, "_current", lambda device: side)

    def broken() -> Iterator[Any]:
        yield from (int("sample 3") for _ in range(1))

    with pytest.raises(ValueError, match="sample 3"):
        list(prefetch(broken(), torch.device("cuda:0")))
    assert current == ["main"]


def loader(device: torch.device, workers: int | None) -> TrainLoader:
    pixels = np.random.default_rng(0).integers(0, 256, (300, 3, 32, 32), dtype=np.uint8)
    images = ArraySet("some", ("a", "b"), (0.5,) * 3, (0.2,) * 3, (pixels,), np.arange(300) % 2, "some")
    read = resident(images, device) if workers is None else streaming(images, device, workers)
    augment = Augment(images.mean, images.std, 3, crop_padding=4, flip=True, cutout=5)
    return TrainLoader(images, Order(300, 64, 1), augment, World(0, 1, 0, 1, device, "none"), read)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [None, 0, 1])
def test_the_gpu_sees_the_same_batches_under_load(workers: int | None) -> None:
    """Each batch is read late, behind a long kernel, so that memory given away too early would show."""
    device = torch.device("cuda:0")
    busy = torch.randn(4096, 4096, device=device)
    expected = [batch.images for epoch in loader(CPU, None).epochs(3) for batch in epoch]
    found = []
    for epoch in loader(device, workers).epochs(3):
        for batch in epoch:
            for _ in range(10):
                busy = (busy @ busy).clamp_(-1, 1)
            found.append(batch.images.clone())
            del batch
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)
