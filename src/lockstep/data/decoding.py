"""From the bytes of a picture to pixels: whole, or shrunk to a shorter side, whatever kind of file it is.

The bits are Pillow's. torchcodec decodes whole JPEG files with the same bits in about half the time (0.58 ms against
1.0 for 500x375 pixels on one core); where it isn't installed, or a JPEG is in CMYK or damaged, Pillow does it.

Memory is bounded: what takes more than 960 MiB to decode is refused (LOCKSTEP_DECODE_MIB).
"""

import io
import os
import re
import struct
import warnings
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

_codec: Any = None
with suppress(ImportError, OSError, RuntimeError):  # not installed, or not for this torch; older ones know no pictures
    _codec = module if hasattr(module := import_module("torchcodec.decoders"), "decode_jpeg") else None

# Pillow's own limits call sound files broken: 179 megapixels, 1 MiB of text in a PNG. `opened` has one of its own.
Image.MAX_IMAGE_PIXELS = None
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
HEIF_PACKAGE = "pillow-heif"
_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")  # how such a file calls itself
_JPEG = ("JPEG", "MPO")  # as Pillow calls the files that telephones write
_TRANSPOSED = (5, 6, 7, 8)  # EXIF's orientations whose rows are columns; then come the flips,
_TOP_DOWN, _MIRRORED = (3, 4, 7, 8), (2, 3, 6, 7)  # top to bottom, and left to right
_HALVED = 1 << 27  # pixels, from which on a picture is read at half its width and height
_STRIP = 1 << 22  # pixels that are converted at a time


def decode(data: bytes, short: int = 0) -> Tensor:
    """An encoded image as RGB, uint8 [3, h, w]. Raises whatever a decoder makes of a broken file.

    `short`: turn it upright by its EXIF orientation and shrink its shorter side to so many pixels, if it has more; a
    JPEG is then decoded at a half, a quarter or an eighth where that suffices. 0: as it is stored.
    """
    if short:
        return shrunk(opened(data), short, data)
    pixels = _by_torchcodec(data)
    return _rgb(opened(data), data) if pixels is None else pixels


def shrunk(image: Image.Image, short: int, data: bytes = b"") -> Tensor:
    """`decode` of what Pillow has opened, and not read yet; `data`: its file, if that is at hand."""
    stored, size = image.size, short_side_to(short, image.height, image.width)
    is_jpeg = image.format in _JPEG
    if is_jpeg:
        image.draft(None, size[::-1])  # 19 ms for 4000x3000 pixels, where the whole and its resizing take 153
    pixels = _by_torchcodec(data) if image.size == stored else None
    if pixels is None:
        pixels = _rgb(image, data)
    if not is_jpeg:  # a TIFF is turned by being read
        size = short_side_to(short, *pixels.shape[1:])
    return packed(upright(resized(pixels, *size), _orientation(image.info.get("exif") or b"")))


def opened(data: bytes) -> Image.Image:
    """A file as Pillow opens it: nothing but its head is read. ValueError where decoding takes too much memory."""
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF:
        _register_heif()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged EXIF
            image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:  # its message is the address of the bytes
        heif = f"HEIC, which {HEIF_PACKAGE} reads (pip install 'lockstep-torch[heif]')"
        kind = heif if data[4:8] == b"ftyp" else "of no format that Pillow knows"
        raise ValueError(f"it is {kind}, or torn at its beginning" if data else "it is empty, 0 bytes") from error
    needed, most = (len(data) + _decoder_bytes(image)) >> 20, int(os.environ.get("LOCKSTEP_DECODE_MIB") or 960)
    if needed > most:
        raise ValueError(
            f"its {image.width:,} x {image.height:,} pixels take {needed:,} MiB to decode, and {most:,} are allowed: "
            f"shrink it, or set LOCKSTEP_DECODE_MIB={needed}"
        )
    return image


def _decoder_bytes(image: Image.Image) -> int:
    """What a picture takes in memory at once, about: in the decoder, in Pillow, and as pixels."""
    pixels = image.width * image.height
    whole = pixels <= _HALVED
    if image.format in _JPEG:
        layers = [(h, v) for _, h, v, *_ in getattr(image, "layer", [])] or [(1, 1)]
        most = max(h for h, _ in layers) * max(v for _, v in layers)
        coefficients = 2 * pixels * sum(h * v for h, v in layers) // most if image.info.get("progressive") else 0
        return int(coefficients + pixels * 7 // (1 if whole else 4))
    each = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    frames = 1.0 if image.format in ("PNG", "BMP", "PPM", "GIF", "TIFF") else 4.0  # WebP and AVIF keep several
    frames += min(1, getattr(image, "tag_v2", {}).get(278, 0) / image.height)  # TIFF's rows that are decoded together
    return int(pixels * each * frames + pixels * 3 // (1 if whole else 4))


@lru_cache(1)
def _register_heif() -> None:
    """Have Pillow read what iPhones write, where the package for it is there."""
    with suppress(ImportError):  # then nobody knows the format
        import pillow_heif

        pillow_heif.register_heif_opener()


def short_side_to(short: int, height: int, width: int) -> tuple[int, int]:
    """Height and width in proportion, the shorter one at most `short`; the longer is rounded down, as torchvision's."""
    least = min(height, width)
    if least <= short:
        return height, width
    return height * short // least, width * short // least


def resized(image: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """uint8 [3, h, w] to uint8 [3, height, width]; a fifth to a half faster a sample than with Pillow's resize."""
    if image.shape[1:] == (height, width):
        return image  # the same bits
    return F.interpolate(image[None], (height, width), mode=interpolation, antialias=True)[0]


def upright(pixels: Tensor, orientation: int) -> Tensor:
    """Pixels [3, h, w] turned as EXIF's orientation, 1 to 8, says that they are to be seen."""
    if orientation in _TRANSPOSED:
        pixels = pixels.transpose(1, 2)
    flips = [1] * (orientation in _TOP_DOWN) + [2] * (orientation in _MIRRORED)
    return pixels.flip(flips) if flips else pixels


def packed(pixels: Tensor) -> Tensor:
    """[3, h, w] with the three values of a pixel side by side: crops of it are resized in two thirds of the time."""
    return pixels.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def _by_torchcodec(data: bytes) -> Tensor | None:
    """uint8 [3, h, w] as stored, of a sound JPEG in grey or colours that is not too large, else None."""
    if _codec is None or not data.startswith(b"\xff\xd8\xff"):
        return None
    progressive, pixels = _jpeg_frame(data)
    if not 0 < pixels <= (_HALVED >> 1 if progressive else _HALVED):
        return None
    # torchcodec turns by EXIF, which is hidden from it: the marker can't stand in a picture's coded data
    hidden = bytearray(re.sub(rb"\xff\xe1(?=..Exif\0\0)", b"\xff\xef", data, flags=re.DOTALL))
    with suppress(RuntimeError):
        found: Tensor = _codec.decode_jpeg(torch.frombuffer(hidden, dtype=torch.uint8), mode="UNCHANGED")
        if found.shape[0] in (1, 3):
            return found.expand(3, -1, -1)
    return None


def _jpeg_frame(data: bytes) -> tuple[bool, int]:
    """Whether a JPEG is progressive, and its number of pixels; 0 where its head is damaged."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return kind == 0xC2, height * width
        at += 1 if kind == 0xFF else 2 + length
    return False, 0


def _rgb(image: Image.Image, data: bytes = b"") -> Tensor:
    """uint8 [3, h, w] of any mode of Pillow's; transparency is dropped, 16 bits become 8. `data`: its file.

    Huge pictures come at half their width and height. All are converted some rows at a time: a second copy of the
    whole would take as much memory again.
    """
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, which say neither what is black nor what is white")
    deep = ";16" in str([tile[3] for tile in getattr(image, "tile", ())]) and not image.mode.startswith("I")
    if image.format in _JPEG and image.width * image.height > _HALVED:
        image.draft(None, (image.width // 2, image.height // 2))
    image.load()
    width, height = image.size
    by = 2 if width * height > _HALVED else 1
    out = np.empty((-(-height // by), -(-width // by), 3), np.uint8)
    step = max(1, _STRIP // width // by) * by
    lowest_bit = _lowest_bit(image.getextrema()[1]) if image.mode.startswith("I") else 0
    for top in range(0, height, step):
        strip = image if step >= height else image.crop((0, top, width, min(height, top + step)))
        if strip.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip to white
            strip = Image.fromarray((np.asarray(strip).astype(np.int64) >> lowest_bit).clip(0, 255).astype(np.uint8))
        if "transparency" in strip.info:  # of a palette: Pillow warns unless it goes through RGBA
            strip = strip.convert("RGBA")
        strip = strip if strip.mode == "RGB" else strip.convert("RGB")
        out[top // by : (top + step) // by] = np.asarray(strip if by == 1 else strip.reduce(by))
    if deep and data and out.max() < 16:  # the upper 8 bits of colours that have 16, and use 12 at most
        if _codec is None or not data.startswith(b"\x89PNG"):
            raise ValueError("its colours have 16 bits and use 12 at most, so they would be black: save it with 8 bits")
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        values: Tensor = _codec.decode_png(encoded, mode="RGB", output_dtype=torch.uint16).to(torch.int32)
        return (values >> _lowest_bit(values.max())).to(torch.uint8)
    return torch.from_numpy(out).permute(2, 0, 1)


def _lowest_bit(highest: Any) -> int:
    """Which bit of 16-bit values becomes the last of 8: files hold 8, 12 or 16, and rarely say so."""
    return 0 if highest < 256 else 4 if highest < 4096 else 8


def _orientation(exif: bytes) -> int:
    """EXIF's orientation, 1 to 8; 1, upright, where it says none or is damaged.

    Read here: Pillow's reader warns of damage in some tags and raises for others, and a picture is none the worse.
    """
    block = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    with suppress(struct.error):
        if order is not None:
            (start,) = struct.unpack_from(f"{order}I", block, 4)
            (count,) = struct.unpack_from(f"{order}H", block, start)
            for entry in range(start + 2, start + 2 + 12 * count, 12):
                tag, kind, _, value = struct.unpack_from(f"{order}HHIH", block, entry)
                if (tag, kind) == (0x0112, 3) and value in range(1, 9):
                    return int(value)
    return 1
