import errno
import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop, v2

from lockstep.config import DataConfig
from lockstep.data import decoding
from lockstep.data.decoding import decode
from lockstep.data.folder import EXTENSIONS, FolderSet, centre_crop, crop_box
from lockstep.data.layout import load_folders, load_undivided
from lockstep.data.sources import load
from lockstep.errors import UserError
from lockstep.processes.world import World
from tests.data.formats import write_folders

SUFFIXES = (".png", ".JPG", ".jpeg", ".webp", ".bmp", ".ppm", ".tif", ".TIFF", ".gif")
draws22 = st.lists(st.floats(0, 1, exclude_max=True), min_size=22, max_size=22)
sides = st.integers(1, 700)


def test_classes_and_files_are_sorted_and_labelled(tmp_path: Path) -> None:
    write_folders(tmp_path, ("bee", "ant"), len(SUFFIXES), SUFFIXES)
    for name in (".hidden.png", "notes.txt"):
        (tmp_path / "train/ant" / name).write_text("no image")
    (tmp_path / "train/.cache").mkdir()
    (tmp_path / "train/bee/more").mkdir()
    shutil.copy(tmp_path / "train/bee/0.png", tmp_path / "train/bee/more/0.png")
    train, val = load(DataConfig(dataset="folder", image_size=16), tmp_path, 0, World.single())
    assert (len(train), len(val), train.classes, train.shape) == (19, 18, ("ant", "bee"), (3, 16, 16))
    assert isinstance(train, FolderSet)
    found = [train.path(i) for i in range(len(train))]
    assert [str(path.relative_to(tmp_path / "train")) for path in found] == sorted(
        str(path.relative_to(tmp_path / "train"))
        for path in (tmp_path / "train").rglob("*.*")
        if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")
    )
    images, labels = train.read(np.arange(19), None)
    assert images.shape == (19, 3, 16, 16)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0] * 9 + [1] * 10
    assert torch.equal(images[9], images[18])  # the copy
    assert set(train.left_out.split(", ")) == {"1 folder .cache", "1 hidden", "1 .txt"}
    assert isinstance(val, FolderSet)
    assert val.left_out == ""


def test_the_default_size_is_224_and_test_may_stand_for_val(tmp_path: Path) -> None:
    write_folders(tmp_path)
    (tmp_path / "val").rename(tmp_path / "test")
    train, val = load(DataConfig(dataset="folder"), tmp_path, 0, World.single())
    assert train.shape == val.shape == (3, 224, 224)
    assert isinstance(val, FolderSet)
    assert val.root == tmp_path / "test"


def test_a_crop_is_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    write_folders(tmp_path, count=4)
    train, _ = load_folders(tmp_path, 24, 3, resized_crop=True)
    ids = np.arange(8)
    images, labels = train.read(ids, 5)
    shuffled = np.array([6, 1, 1, 3])
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again.read(shuffled, 5)[0], images[shuffled])
    assert torch.equal(again.read(shuffled, 5)[1], labels[shuffled])
    assert torch.equal(torch.cat([train.read(ids[i : i + 1], 5)[0] for i in range(8)]), images)
    images = images[3:]
    ids = ids[3:]
    for path in (train.path(1), train.path(2)):
        shutil.copy(train.path(0), path)  # one image three times
    twins = train.read(np.arange(3), 5)[0]
    assert len({twin.numpy().tobytes() for twin in twins}) == 3
    other_seed, _ = load_folders(tmp_path, 24, 4, resized_crop=True)
    for others in (train.read(ids, 6)[0], other_seed.read(ids, 5)[0], train.read(ids, None)[0]):
        assert not any(torch.equal(a, b) for a, b in zip(images, others, strict=True))


def test_evaluation_and_training_without_random_crops_see_the_centre(tmp_path: Path) -> None:
    write_folders(tmp_path)
    plain, val = load_folders(tmp_path, 24, 3, resized_crop=False)
    random, _ = load_folders(tmp_path, 24, 3, resized_crop=True)
    ids = np.arange(6)
    assert torch.equal(plain.read(ids, 0)[0], plain.read(ids, None)[0])
    assert torch.equal(plain.read(ids, 7)[0], random.read(ids, None)[0])
    _, val_random = load_folders(tmp_path, 24, 3, resized_crop=True)
    assert torch.equal(val_random.read(ids, 9)[0], val.read(ids, None)[0])


@given(height=sides, width=sides, draws=draws22)
def test_a_crop_lies_inside_and_has_an_allowed_shape(height: int, width: int, draws: list[float]) -> None:
    top, left, h, w = crop_box(height, width, draws)
    assert 0 <= top <= top + h <= height
    assert 0 <= left <= left + w <= width
    assert h >= 1
    assert w >= 1
    if min(height, width) >= 2:
        assert (w - 0.5) / (h + 0.5) <= 4 / 3 + 1e-9
        assert (w + 0.5) / (h - 0.5) >= 3 / 4 - 1e-9


@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1), (3 / 4, 4 / 3)), ((0.35, 0.6), (0.5, 0.9))])
def test_crops_have_the_published_distribution(scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    draws = np.random.default_rng(0).random((4000, 22))
    boxes = np.array([crop_box(400, 500, row, scale, ratio) for row in draws])
    area, shape = boxes[:, 2] * boxes[:, 3] / 200_000, np.log(boxes[:, 3] / boxes[:, 2])
    blank = torch.empty(1, 400, 500)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = np.array([RandomResizedCrop.get_params(blank, [*scale], [*ratio]) for _ in range(4000)])
    their_area = theirs[:, 2] * theirs[:, 3] / 200_000
    their_ratio = np.log(theirs[:, 3] / theirs[:, 2])
    quantiles = np.linspace(0.05, 0.95, 19)
    for ours, reference, tolerance in ((area, their_area, 0.05), (shape, their_ratio, 0.02)):
        assert np.quantile(ours, quantiles) == pytest.approx(np.quantile(reference, quantiles), abs=tolerance)
    for place, room in ((0, 400 - boxes[:, 2]), (1, 500 - boxes[:, 3])):
        fraction = boxes[:, place][room > 20] / room[room > 20]
        assert np.quantile(fraction, quantiles) == pytest.approx(quantiles, abs=0.05)


@pytest.mark.parametrize(("height", "width"), [(60, 90), (90, 61), (33, 33), (20, 200), (8, 9)])
@pytest.mark.parametrize("size", [28, 21])
def test_the_centre_crop_is_torchvisions(height: int, width: int, size: int) -> None:
    image = torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    theirs = v2.Compose([v2.Resize(round(size * 256 / 224), antialias=True), v2.CenterCrop(size)])(image)
    assert torch.equal(centre_crop(image, size, 224 / 256), theirs)


def decoded(image: Image.Image, kind: str, **options: Any) -> Tensor:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return decode(buffer.getvalue())


def test_every_mode_decodes_to_rgb() -> None:
    red = torch.tensor([200, 30, 40])
    rgb = Image.new("RGB", (5, 4), (200, 30, 40))
    for image, kind, options in (
        (rgb, "PNG", {}),
        (rgb, "BMP", {}),
        (rgb, "PPM", {}),
        (rgb, "WEBP", {"lossless": True}),
        (rgb.convert("RGBA"), "PNG", {}),
        (rgb.quantize(4), "PNG", {"transparency": b"\x80\xff"}),
        (rgb, "JPEG", {"quality": 95}),
        (rgb.convert("CMYK"), "JPEG", {"quality": 95}),
    ):
        pixels = decoded(image, kind, **options)
        assert pixels.shape == (3, 4, 5)
        assert pixels.dtype == torch.uint8
        assert (pixels.int() - red[:, None, None]).abs().max() <= (4 if kind == "JPEG" else 0), (kind, image.mode)
    for kind in ("PNG", "JPEG"):
        grey = decoded(Image.new("L", (5, 4), 77), kind)
        assert grey.shape == (3, 4, 5)
        assert grey.unique().tolist() == [77]
    deep = decoded(Image.fromarray(np.full((4, 5), 77 * 256 + 9, np.uint16)), "PNG")
    assert deep.shape == (3, 4, 5)
    assert deep.unique().tolist() == [77]


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}], ids=str)
def test_a_jpeg_has_pillows_bits(mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    decode_jpeg = decoding._decode_jpeg
    by_torchvision: list[Tensor] = []
    assert decode_jpeg is not None

    def noted(data: Tensor) -> Tensor:
        by_torchvision.append(decode_jpeg(data))
        return by_torchvision[-1]

    monkeypatch.setattr(decoding, "_decode_jpeg", noted)
    pixels = np.random.default_rng(0).integers(0, 256, (41, 58, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", **options)
    ours = decode(buffer.getvalue())
    theirs = np.array(Image.open(buffer).convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(ours.numpy(), theirs)
    assert [found.shape[0] for found in by_torchvision] == [{"L": 1, "RGB": 3, "CMYK": 4}[mode]]
    monkeypatch.setattr(decoding, "_decode_jpeg", None)
    assert torch.equal(decode(buffer.getvalue()), ours)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_truncated_or_foreign_file_is_named_with_its_sample(suffix: str, tmp_path: Path) -> None:
    write_folders(tmp_path, ("a",), 3, (suffix,))
    train, _ = load_folders(tmp_path, 16, 0, resized_crop=True)
    path = train.path(1)
    whole = path.read_bytes()
    for harmed in (whole[: len(whole) * 2 // 3], whole[:20], b"", b"not an image at all"):
        path.write_bytes(harmed)
        for epoch in (0, None):
            with pytest.raises(UserError) as caught:
                train.read(np.array([0, 1]), epoch)
            assert f"{path} (sample 1)" in caught.value.message
            assert caught.value.remedy
    path.unlink()
    with pytest.raises(UserError, match=r"\(sample 1\)"):
        train.read(np.array([1]), 0)


def denied(path: Any, *_: Any) -> Any:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_picture_without_the_right_to_read_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folders(tmp_path)
    train, _ = load_folders(tmp_path, 16, 0, resized_crop=False)
    monkeypatch.setattr(Path, "read_bytes", denied)  # root may read everything
    with pytest.raises(
        UserError, match=rf"{train.path(1)} \(sample 1\) cannot be read as an image: .*Permission denied"
    ):
        train.read(np.array([1]))


@pytest.mark.parametrize("closed", ["train", "val/bee"])
def test_a_folder_without_the_right_to_list_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    write_folders(tmp_path)
    folder, scandir = tmp_path / closed, os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (denied if Path(path) == folder else scandir)(path))
    with pytest.raises(UserError, match=f"{folder} can't be read: Permission denied\n.* give this user the right"):
        load_folders(tmp_path, 16, 0, resized_crop=False)


def test_a_picture_that_goes_between_the_listing_and_the_first_step_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path)
    train, _ = load_folders(tmp_path, 16, 0, resized_crop=False)
    train.path(4).unlink()
    with pytest.raises(UserError, match=rf"{train.path(4)} \(sample 4\): No such file or directory\n  Put it back"):
        _ = train.fingerprint


def test_the_fingerprint_follows_paths_sizes_and_classes(tmp_path: Path) -> None:
    write_folders(tmp_path)

    def fingerprints() -> tuple[str, ...]:
        return tuple(images.fingerprint for images in load_folders(tmp_path, 16, 0, resized_crop=True))

    first = fingerprints()
    assert fingerprints() == first
    path = tmp_path / "train/ant/0.png"
    path.write_bytes(path.read_bytes() + b"\0")
    longer = fingerprints()
    assert longer[0] != first[0]
    assert longer[1] == first[1]
    path.rename(path.with_name("00.png"))
    renamed = fingerprints()
    assert renamed[0] not in (longer[0], first[0])


def test_bad_layouts_are_user_errors(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as caught:
            load(DataConfig(dataset="folder"), tmp_path, 0, World.single())
        assert caught.value.remedy

    refused(r"there is no folder .*train")
    write_folders(tmp_path)
    shutil.rmtree(tmp_path / "val")
    refused(r"there is no folder .*val")
    (tmp_path / "val").mkdir()
    refused(r"val holds no class folders")
    (tmp_path / "val/ant").mkdir()
    refused(r"hold different classes: only one of them has bee")
    (tmp_path / "val/bee").mkdir()
    refused(r"class folder .*val/ant holds no image")


ODD = {
    "fifo": ("is no plain file", lambda path, _: os.mkfifo(path)),
    "dangling": ("is a link to nothing", lambda path, _: path.symlink_to("nowhere.png")),
    "loop": ("can't be read: Too many levels of symbolic links", lambda path, _: path.symlink_to(path)),
    "outside": ("outside of", lambda path, other: path.symlink_to(other / "secret.png")),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_image_file_of_the_folder_is_named(tmp_path: Path, kind: str) -> None:
    for split in ("train", "val"):
        (tmp_path / "set" / split / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "set" / split / "cat" / "whole.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    message, make = ODD[kind]
    make(tmp_path / "set/train/cat/odd.png", tmp_path)
    with pytest.raises(UserError, match=f"odd.png.*{message}"):
        load_folders(tmp_path / "set", 8, 0, resized_crop=False)
    if kind == "outside":
        train, _ = load_folders(tmp_path / "set", 8, 0, resized_crop=False, follow_links=True)
        assert len(train) == 2


@pytest.mark.parametrize("take", [load_folders, load_undivided])
def test_a_set_behind_a_closed_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, take: Callable[..., object]
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", closed)
    with pytest.raises(UserError, match=r"can't be read: Permission denied"):
        take(tmp_path, 8, 0, resized_crop=False)


def test_what_lies_beside_the_classes_is_told(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for name in ("notes.txt", ".hidden.png"):
        (tmp_path / "train" / name).touch()
    assert load_folders(tmp_path, 8, 0, resized_crop=False)[0].left_out == ""
    for name in ("a.png", "b.PNG"):
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / name)
    os.mkfifo(tmp_path / "train/c.jpg")
    train, val = load_folders(tmp_path, 8, 0, resized_crop=False)
    assert (train.left_out, val.left_out) == ("2 .png beside the classes, 1 .jpg beside the classes", "")
    for split in ("train", "val"):
        (tmp_path / split / "eel").symlink_to(tmp_path / "unmounted/eel")
    with pytest.raises(UserError, match=r"train/eel is a link to nothing, and may have been a class") as told:
        load_folders(tmp_path, 8, 0, resized_crop=False)
    assert told.value.remedy


def test_links_inside_are_followed_and_those_without_an_end_are_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / "cat" / "whole.png")
    (tmp_path / "train/cat/same.png").symlink_to("whole.png")
    train, _ = load_folders(tmp_path, 8, 0, resized_crop=False)
    assert [train.path(i).name for i in range(2)] == ["same.png", "whole.png"]
    (tmp_path / "train/cat/again").symlink_to(tmp_path / "train/cat")
    with pytest.raises(UserError, match="again is a link to a folder above it"):
        load_folders(tmp_path, 8, 0, resized_crop=False)
