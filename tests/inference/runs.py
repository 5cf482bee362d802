"""A run folder as `lockstep train` leaves one, in a moment: random weights, and pictures of odd sizes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.checkpoint import weights
from lockstep.checkpoint.weights import Card
from lockstep.config import Config, DataConfig, Execution, ModelConfig
from lockstep.training.assemble import build_model
from tests.data.formats import folder_sets

CLASSES = ("bee", "ant", "c-d", "c")  # as folders, "c" comes before "c-d" though "c-d/1" sorts before "c/1"
CHUNK = 4


def pictures(root: Path, each: int = 3) -> Path:
    """Class folders with pictures of odd sizes."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for number, name in enumerate(CLASSES):
            for k in range(each):
                file = root / split / name / f"{k}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                size = (20 + 3 * k + number, 27 - 2 * k, 3)
                Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8)).save(file)
    return root


def config(root: Path, **data: Any) -> Config:
    return Config(
        data=DataConfig(dataset="folder", **({"image_size": 16} | data)),
        model=ModelConfig(model="digits_net"),
        execution=Execution(data_dir=str(root), eval_batch_size=CHUNK, workers=0),
    )


def leave_a_run(run: Path) -> Path:
    """The pictures are in `data` below it."""
    asked = config(pictures(run / "data"))
    train, _ = folder_sets(run / "data", 16)
    (run / "weights").mkdir()
    model = build_model(replace(asked, seed=3), train)
    weights.save(model, run / "weights" / "best.safetensors", Card.of(asked, train).to_metadata())
    return run
