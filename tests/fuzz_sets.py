"""Data for tests/fuzz_law.py: digits with several labels each, and a folder of small pictures.

`python -m tests.fuzz_sets DIR` writes the folder, to try a command line of the fuzzer's by hand.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lockstep.data.official import DIGITS, DIGITS_ROOT, load_official
from lockstep.distributed.world import World

PICTURES, CLASSES = 160, 4  # to train on


def several() -> Any:
    """The bundled digits; of each it is said whether it is even, a prime, above four, and a square."""
    sets = load_official(DIGITS, DIGITS_ROOT, World.single())
    found = []
    for images in sets:
        pixels, labels = images.load_all()
        classes = [labels % 2 == 0, (labels[:, None] == torch.tensor([2, 3, 5, 7])).any(1), labels > 4]
        found.append((pixels, torch.stack([*classes, (labels[:, None] == torch.tensor([0, 1, 4, 9])).any(1)], 1)))
    return found


def write_pictures(root: Path) -> None:
    """Class folders of pictures of 9 to 30 pixels a side, some of them JPEGs with an orientation."""
    draws = np.random.default_rng(0)
    for split, count in (("train", PICTURES), ("val", 37)):
        for number in range(count):
            file = root / split / f"class{number % CLASSES}" / f"{number}.{'png' if number % 3 else 'jpg'}"
            file.parent.mkdir(parents=True, exist_ok=True)
            size = (*draws.integers(9, 31, 2), 3)
            exif = Image.Exif()
            exif[0x0112] = 1 + number % 8
            Image.fromarray(draws.integers(0, 256, size, dtype=np.uint8)).save(file, exif=exif)


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]))
