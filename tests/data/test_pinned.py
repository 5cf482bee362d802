"""Orders, pixels, crops and fingerprints of earlier versions: who trains again with the same seed gets the same run."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config import Config, DataConfig, Execution, SamplesConfig
from lockstep.data.picture_set import crop_box
from lockstep.data.sources import load
from lockstep.distributed.world import World
from lockstep.randomness import stream, uniform_np
from lockstep.training.assemble import eval_loader, load_data, train_loader

CPU = torch.device("cpu")
Fields = dict[str, Any]
REFLECTED: Fields = {"crop_padding": 2, "crop_fill": "reflect", "alternate_flip": True}
# data, samples, the rest of a config on digits -> SHA-256 of the ids of two epochs, and of all images and labels
PINNED: list[tuple[Fields, Fields, Fields, str, str]] = [
    ({}, {}, {}, "a5319a56d2a0bb29", "5c88994a4a1b6dfa"),
    ({"crop_padding": 1, "flip": True, "cutout": 2}, {}, {"accumulate": 3}, "a5319a56d2a0bb29", "e2b6da821f666741"),
    (REFLECTED, {}, {"exact": 6}, "a5319a56d2a0bb29", "73265c8049bbbe6a"),
    ({}, {"balance": "equal"}, {}, "cf5f44cf13bbb080", "3fe8bf54c9cca30b"),
    ({"drop_last": True}, {"balance": "sqrt", "aug_repeats": 2}, {}, "d9c1c5c10a435408", "27c4584f7f3c25bb"),
    ({}, {"aug_repeats": 3}, {}, "6653ed9fcaa71fb5", "efe3a1e40b5d32af"),
]


@pytest.mark.parametrize(("data", "samples", "more", "ids", "pixels"), PINNED)
def test_order_and_pixels(data: Fields, samples: Fields, more: Fields, ids: str, pixels: str) -> None:
    chosen = DataConfig(dataset="digits", fraction=0.2, **data)
    execution = Execution(workers=0, eval_batch_size=100)
    config = Config(batch_size=30, seed=3, data=chosen, samples=SamplesConfig(**samples), execution=execution, **more)
    train, val = load_data(config, World.single())
    order, seen = hashlib.sha256(), hashlib.sha256()
    for size in (1, 2, 3):
        for rank in range(size):
            loader = train_loader(config, train, World(rank, size, rank, size, CPU, "none"))
            for batch in (batch for epoch in loader.epochs(2) for batch in epoch):
                order.update(batch.all_ids.astype("<i8").tobytes())
                for part in (batch.images, batch.labels):
                    seen.update(part.contiguous().numpy().tobytes())
    for _, images, labels in eval_loader(config, val, World.single()):
        seen.update(images.contiguous().numpy().tobytes() + labels.numpy().tobytes())
    assert (order.hexdigest()[:16], seen.hexdigest()[:16]) == (ids, pixels)


def test_random_crops() -> None:
    boxes = hashlib.sha256()
    for scale, ratio in (((0.08, 1.0), (3 / 4, 4 / 3)), ((0.35, 0.6), (0.5, 0.9))):
        for epoch in range(2):
            key = stream(7, "resized-crop", epoch)
            drawn = uniform_np(key, np.arange(500)[:, None] * 32 + np.arange(22)).tolist()
            for k, row in enumerate(drawn):
                boxes.update(repr(crop_box(40 + k % 300, 30 + k % 411, row, scale, ratio)).encode())
    assert boxes.hexdigest()[:16] == "f525ea7ae0320eed"


def test_fingerprints_of_folders_and_tables(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            for k in range(3):
                file = tmp_path / split / name / f"{k}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(f"{split} {name} {k}".encode() * (k + 1))
    rows = [f"{s}/{name}/{k}.png,{name};any" for s in ("train", "val") for name in ("ant", "bee") for k in range(3)]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    found = [
        *load(DataConfig(dataset="folder"), tmp_path, 0, World.single()),
        *load(DataConfig(dataset="table:list.csv:separator=;", val_fraction=0.5), tmp_path, 0, World.single()),
    ]
    assert [each.fingerprint[:16] for each in found] == [
        *("7e593d20e372cded", "c3a22f3da9ce0420"),
        *("136885aa947efe0c", "f32e69d60476bd9d"),
    ]
