"""Pictures shrunk and turned as they are read: every kind of file, every orientation, any damage to EXIF."""

import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from lockstep.config import DataConfig
from lockstep.data import decoding, picture_set
from lockstep.data.decoding import decode, short_side_to, shrunk, upright
from lockstep.data.sources import load
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.data.formats import folder_sets, picture_sets, write_folders
from tests.data.photos import encoded, photo, turned

sides = st.integers(1, 60)


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_every_orientation_is_turned_upright(orientation: int, kind: str) -> None:
    data = encoded(photo(23, 14), kind, exif=turned(orientation), **({"lossless": True} if kind == "WEBP" else {}))
    expected = pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert torch.equal(decode(data, 99), expected)
    assert torch.equal(upright(pixels(photo(23, 14)), orientation).sum(), pixels(photo(23, 14)).sum())
    if kind in ("PNG", "JPEG"):  # as stored, in the published recipes
        assert decode(data).shape == (3, 14, 23)
    assert decode(data, 7).shape == ((3, 7, 11) if orientation <= 4 else (3, 11, 7))


@given(st.integers(2, 60), sides, sides)  # torch resizes nothing to a single pixel
def test_the_shorter_side_is_what_was_asked_for_and_nothing_is_enlarged(short: int, height: int, width: int) -> None:
    new_height, new_width = short_side_to(short, height, width)
    assert (new_height <= new_width) == (height <= width) or new_height == new_width
    if min(height, width) <= short:
        assert (new_height, new_width) == (height, width)
    else:
        assert min(new_height, new_width) == short
        image = torch.zeros(3, height, width, dtype=torch.uint8)
        assert v2.Resize(short)(image).shape[1:] == (new_height, new_width)


def test_without_scaled_decoding_the_pixels_are_torchvisions() -> None:
    for image in (photo(90, 61), photo(50, 200), photo(33, 32)):
        theirs = v2.Resize(32, antialias=True)(pixels(image))
        assert torch.equal(decode(encoded(image, "PNG"), 32), theirs)
        data = encoded(image, "JPEG", quality=95)
        if min(image.size) < 64:  # whole: a half would be smaller than 32
            assert torch.equal(decode(data, 32), v2.Resize(32, antialias=True)(decode(data)))


@pytest.mark.parametrize(
    ("size", "scale"), [((640, 480), 8), ((640, 472), 4), ((300, 240), 4), ((130, 121), 2), ((119, 119), 1)]
)
def test_a_jpeg_is_decoded_at_the_least_scale_that_suffices(size: tuple[int, int], scale: int) -> None:
    image = photo(*size)
    for options in ({}, {"progressive": True}):
        data = encoded(image, "JPEG", quality=90, **options)
        opened = Image.open(io.BytesIO(data))
        small = shrunk(opened, 60)
        stored = tuple(-(-side // scale) for side in size)
        assert opened.size == stored
        assert torch.equal(small, decode(data, 60))
        whole = v2.Resize(60, antialias=True)(decode(data))
        assert small.shape == whole.shape
        assert (small.float() - whole.float()).pow(2).mean().sqrt() < 4, "of 255"


def test_every_kind_of_picture_becomes_rgb() -> None:
    image, deep = photo(40, 30), np.asarray(photo(40, 30).convert("L")).astype(np.uint16)
    for form, options in (("RGBA", {}), ("LA", {}), ("P", {}), ("P", {"transparency": 3}), ("1", {}), ("L", {})):
        converted = image.convert(form)
        found = decode(encoded(converted, "PNG", **options), 99)
        assert torch.equal(found, pixels(converted.convert("RGBA")))
    assert decode(encoded(image.convert("1"), "TIFF"), 99).unique().tolist() == [0, 255]
    for kind in ("PNG", "TIFF", "PPM"):
        found = decode(encoded(Image.fromarray(deep * 256 + 9), kind), 99)[0]
        assert torch.equal(found.int(), torch.tensor(deep.astype(int)))
    cmyk = decode(encoded(image.convert("CMYK"), "JPEG", quality=95), 99)
    assert (cmyk.float() - pixels(image).float()).abs().mean() < 6
    frames = {"save_all": True, "append_images": [photo(40, 30, 1)], "lossless": True}
    for kind in ("WEBP", "PNG", "TIFF"):
        assert torch.equal(decode(encoded(image, kind, **frames), 99), pixels(image)), kind
    animated = encoded(image.convert("P"), "GIF", save_all=True, append_images=[photo(40, 30, 1).convert("P")])
    assert torch.equal(decode(animated, 99), pixels(image.convert("P")))
    with pytest.raises(ValueError, match="floating-point"):
        decode(encoded(Image.fromarray(deep.astype(np.float32)), "TIFF"), 99)


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_heic_is_turned_upright(orientation: int | None) -> None:
    pytest.importorskip("pillow_heif").register_heif_opener()
    exif = {"exif": turned(orientation).tobytes()} if orientation else {}
    data = encoded(photo(64, 48), "HEIF", quality=95, **exif)
    expected = pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(photo(64, 48), "PNG", **exif)))))
    found = decode(data, 99)
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).abs().mean() < 6
    assert min(decode(data, 24).shape[1:]) == 24


def test_heic_without_its_package_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folders(tmp_path)
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 99
    (tmp_path / "train/bee/IMG_1.HEIC").write_bytes(heic)
    monkeypatch.setattr(picture_set, "find_spec", lambda _: None)
    missing = r"1 of 7 pictures of .*train are HEIC, and pillow-heif is not installed"
    with pytest.raises(UserError, match=missing) as caught:
        picture_sets("folder", tmp_path)
    assert "pip install 'lockstep-torch[heif]'" in caught.value.remedy
    with pytest.raises(ValueError, match=r"HEIC, which pillow-heif reads \(pip install .*\), or torn"):
        decode(heic)


def test_the_centre_of_a_thin_picture_is_not_enlarged_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    resize = decoding.resized

    def noted(image: Tensor, height: int, width: int, *how: str) -> Tensor:
        made.append(height * width)
        return resize(image, height, width, *how)

    monkeypatch.setattr(picture_set, "resized", noted)
    for width, height in ((1, 12_000), (12_000, 1), (3, 50_000), (300, 70_000)):
        for crop_pct in (0.875, 1.0):
            strip = torch.arange(width * height).reshape(1, height, width).expand(3, -1, -1).to(torch.uint8)
            assert picture_set.centre_crop(strip, 224, crop_pct, "bicubic").shape == (3, 224, 224)
    assert max(made) <= 1 << 26


@pytest.mark.parametrize("size", [(40, 400), (12, 250), (7, 99), (200, 2000)])
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_cropped_before_it_is_enlarged_a_picture_is_the_same_but_for_rounding(
    size: tuple[int, int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for image in (pixels(photo(*size)), pixels(photo(*size[::-1]))):
        whole = picture_set.centre_crop(image, 48, 0.875, how)
        monkeypatch.setattr(picture_set, "_LARGEST", 0)
        cropped = picture_set.centre_crop(image, 48, 0.875, how)
        monkeypatch.undo()
        assert (whole.int() - cropped.int()).abs().float().mean() < 6, "at most half a pixel of it moves"


def png(values: np.ndarray, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG of 16 bits a value, [h, w, channels]; `more`: chunks before the pixels."""
    height, width, channels = values.shape
    head = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", head), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("bits", [8, 12, 16])
def test_16_bits_that_use_8_or_12_are_scaled_by_these(channels: int, bits: int) -> None:
    if channels > 1 and bits < 16:
        pytest.importorskip("torchcodec")
    values = np.random.default_rng(bits).integers(0, 1 << bits, (9, 11, channels))
    values[0, 0] = (1 << bits) - 1
    expected = torch.from_numpy((values[..., :3] >> bits - 8).astype(np.uint8)).permute(2, 0, 1).expand(3, -1, -1)
    assert torch.equal(decode(png(values)), expected)
    assert torch.equal(decode(png(values), 99), expected)
    if channels == 1:
        for kind in ("TIFF", "PPM"):
            assert torch.equal(decode(encoded(Image.fromarray(values[..., 0].astype(np.uint16)), kind)), expected)


def test_colours_that_would_be_black_are_named_where_nothing_can_scale_them(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.full((5, 6, 3), 900)
    monkeypatch.setattr(decoding, "_codec", None)
    with pytest.raises(ValueError, match="16 bits and use 12 at most, so they would be black"):
        decode(png(values))
    assert decode(png(values * 9)).max() == 900 * 9 >> 8


def test_a_png_with_much_text_is_sound() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (9, 11, 3))
    for chunk in (
        (b"tEXt", b"Comment\0" + b"x" * (2 << 20)),
        (b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * (2 << 20))),
    ):
        assert torch.equal(decode(png(values, chunk), 99), decode(png(values)))


def test_huge_pictures_are_halved_and_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    image = photo(96, 80)
    files = {kind: encoded(image, kind) for kind in ("PNG", "BMP", "PPM", "TIFF")}
    files |= {f"PNG {mode}": encoded(image.convert(mode), "PNG") for mode in ("RGBA", "P", "L", "LA", "1")}
    files |= {f"JPEG {mode}": encoded(image.convert(mode), "JPEG", quality=95) for mode in ("RGB", "L", "CMYK")}
    files["JPEG progressive"] = encoded(image, "JPEG", progressive=True)
    for strip in (1 << 22, 500):  # pixels that are converted together
        monkeypatch.setattr(decoding, "_STRIP", strip)
        whole = {name: decode(data) for name, data in files.items()}
        for name in filter(lambda name: "JPEG" not in name, files):
            plain = Image.open(io.BytesIO(files[name])).convert("RGBA" if "P" in name else "RGB")
            assert torch.equal(whole[name], pixels(plain)), name
        monkeypatch.setattr(decoding, "_HALVED", 96 * 80 - 1)
        for name, data in files.items():
            half = decode(data)
            assert half.shape == (3, 40, 48), name
            near = torch.nn.functional.avg_pool2d(whole[name].float(), 2)
            assert (half.float() - near).abs().mean() < 6, name
            assert decode(data, 20).shape == (3, 20, 24)
        monkeypatch.undo()
    monkeypatch.setenv("LOCKSTEP_DECODE_MIB", "1")
    large, too_much = photo(700, 700), r"its 700 x 700 pixels take \d MiB to decode, and 1 are allowed: shrink it"
    for kind, options in (("PNG", {}), ("WEBP", {}), ("JPEG", {"progressive": True, "subsampling": 0})):
        data = encoded(large, kind, **options)
        with pytest.raises(ValueError, match=too_much) as caught:
            decode(data, 99)
        needed = str(caught.value).rpartition("=")[2]
        with monkeypatch.context() as allowed:
            allowed.setenv("LOCKSTEP_DECODE_MIB", needed)
            assert decode(data, 99).shape == (3, 99, 99)


HUGE = """
import re, sys
from pathlib import Path
from PIL import Image
from lockstep.data import decoding, picture_set
Image.MAX_IMAGE_PIXELS = None
kind, path = sys.argv[1:]
for short in (0, 256):
    with open(path, "rb") as file:
        pixels = decoding.decode(file.read(), short)
    assert min(pixels.shape[1:]) in (7000, 256), pixels.shape
    picture_set.centre_crop(pixels, 224, 0.875)
    del pixels
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 2**20)  # rusage has the parent's
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_196_megapixels_take_less_than_one_and_a_half_gib(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (14_000, 14_000), (70, 80, 90)).save(tmp_path / "huge", kind)
    ended = subprocess.run(
        [sys.executable, "-c", HUGE, kind, tmp_path / "huge"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 1.5


def test_empty_files_are_named_before_training(tmp_path: Path) -> None:
    write_folders(tmp_path)
    train, val = picture_sets("folder", tmp_path)
    (tmp_path / "train/bee/1.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"1 picture.s. of .*train are empty files: .*bee/1.jpg") as caught:
        _ = train.fingerprint
    assert "--skip-broken" in caught.value.remedy
    assert val.fingerprint


@given(st.binary(max_size=60), st.sampled_from([b"", b"II*\0\x08\0\0\0", b"MM\0*\0\0\0\x08"]))
def test_damaged_exif_harms_no_picture(noise: bytes, head: bytes) -> None:
    data = encoded(photo(9, 8), "JPEG", exif=b"Exif\0\0" + head + noise)
    assert sorted(decode(data, 99).shape) == [3, 8, 9]


@given(st.sampled_from("<>"), st.integers(0, 12), st.integers(0, 3))
@settings(max_examples=30)
def test_an_orientation_is_read_in_both_byte_orders(order: str, orientation: int, before: int) -> None:
    entries = b"".join(struct.pack(order + "HHIHH", 0x0100 + i, 3, 1, 7, 0) for i in range(before))
    entries += struct.pack(order + "HHIHH", 0x0112, 3, 1, orientation, 0)
    head = b"II*\0" + struct.pack("<I", 8) if order == "<" else b"MM\0*" + struct.pack(">I", 8)
    found = decoding._orientation(b"Exif\0\0" + head + struct.pack(order + "H", before + 1) + entries)
    assert found == (orientation if 1 <= orientation <= 8 else 1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM", "AVIF"])
def test_a_torn_picture_is_no_picture(kind: str) -> None:
    whole = encoded(photo(300, 200), kind)
    assert decode(whole, 50).shape == (3, 50, 75)
    for torn in (b"", whole[:3], whole[:40], whole[: len(whole) // 2], b"no picture at all"):
        with pytest.raises((ValueError, OSError, SyntaxError, RuntimeError, struct.error)):
            decode(torn, 50)
    with pytest.raises(ValueError, match="it is empty, 0 bytes"):
        decode(b"", 50)


def test_a_set_reads_shrunk_pictures_whatever_their_company(tmp_path: Path) -> None:
    write_folders(tmp_path, count=4)
    train, val = folder_sets(tmp_path, 16, 3, resized_crop=True, decode_size=20)
    plain, _ = folder_sets(tmp_path, 16, 3, resized_crop=True)
    ids = np.arange(8)
    for epoch in (0, None):
        together = train.read(ids, epoch)[0]
        assert torch.equal(torch.cat([train.read(ids[i : i + 1], epoch)[0] for i in range(8)]), together)
        assert not torch.equal(together, plain.read(ids, epoch)[0])
    assert val.read(ids, None)[0].shape == (8, 3, 16, 16)


def test_a_size_that_can_not_be_is_refused(tmp_path: Path) -> None:
    for decode_size, image_size, message in ((200, 0, "of 224 pixels"), (63, 64, "of 64 pixels")):
        with pytest.raises(UserError, match=message):
            DataConfig(decode_size=decode_size, image_size=image_size)
    with pytest.raises(UserError, match=r"--decode-size 256: .* holds no picture files"):
        load(DataConfig(dataset="digits", decode_size=256), tmp_path, 0, World.single())
    DataConfig(decode_size=224)
