"""Pictures as cameras and programs leave them: smooth with noise, turned by EXIF, of every kind of file."""

import io
from typing import Any

import numpy as np
from PIL import Image


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB, smooth with a little noise, so that it compresses as photos do."""
    draws = np.random.default_rng(seed)
    coarse = Image.fromarray(draws.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return Image.fromarray((pixels + draws.integers(-6, 7, pixels.shape)).clip(0, 255).astype(np.uint8))


def turned(orientation: int) -> Image.Exif:
    """EXIF that says how a picture is to be turned, 1 to 8."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
