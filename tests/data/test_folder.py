import errno
import io
import os
import pickle
import shutil
import unicodedata
from pathlib import Path
from types import SimpleNamespace
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
from lockstep.data.folders import image_files, load_part
from lockstep.data.picture_set import EXTENSIONS, centre_crop, crop_box
from lockstep.data.sources import load
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.data.formats import folder_sets, path_of, picture_sets, write_folders

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
    train, val = folder_sets(tmp_path, 16)
    assert (len(train), len(val), train.classes, train.shape) == (19, 18, ("ant", "bee"), (3, 16, 16))
    found = [path_of(train, i) for i in range(len(train))]
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
    assert set(train.left_out.split(", ")) == {"2 hidden or a system's", "1 .txt"}
    assert val.left_out == ""


def test_the_default_size_is_224_and_test_may_stand_for_val(tmp_path: Path) -> None:
    write_folders(tmp_path)
    (tmp_path / "val").rename(tmp_path / "test")
    train, val = picture_sets("folder", tmp_path)
    assert train.shape == val.shape == (3, 224, 224)
    assert val.name == str(tmp_path / "test")


def test_a_crop_is_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    write_folders(tmp_path, count=4)
    train, _ = folder_sets(tmp_path, 24, 3, resized_crop=True)
    ids = np.arange(8)
    images, labels = train.read(ids, 5)
    shuffled = np.array([6, 1, 1, 3])
    again = pickle.loads(pickle.dumps(train))
    assert torch.equal(again.read(shuffled, 5)[0], images[shuffled])
    assert torch.equal(again.read(shuffled, 5)[1], labels[shuffled])
    assert torch.equal(torch.cat([train.read(ids[i : i + 1], 5)[0] for i in range(8)]), images)
    images = images[3:]
    ids = ids[3:]
    for path in (path_of(train, 1), path_of(train, 2)):
        shutil.copy(path_of(train, 0), path)  # one image three times
    twins = train.read(np.arange(3), 5)[0]
    assert len({twin.numpy().tobytes() for twin in twins}) == 3
    other_seed, _ = folder_sets(tmp_path, 24, 4, resized_crop=True)
    for others in (train.read(ids, 6)[0], other_seed.read(ids, 5)[0], train.read(ids, None)[0]):
        assert not any(torch.equal(a, b) for a, b in zip(images, others, strict=True))


def test_evaluation_and_training_without_random_crops_see_the_centre(tmp_path: Path) -> None:
    write_folders(tmp_path)
    plain, val = folder_sets(tmp_path, 24, 3)
    random, _ = folder_sets(tmp_path, 24, 3, resized_crop=True)
    ids = np.arange(6)
    assert torch.equal(plain.read(ids, 0)[0], plain.read(ids, None)[0])
    assert torch.equal(plain.read(ids, 7)[0], random.read(ids, None)[0])
    _, val_random = folder_sets(tmp_path, 24, 3, resized_crop=True)
    assert torch.equal(val_random.read(ids, 9)[0], val.read(ids, None)[0])


@given(
    height=sides, width=sides, draws=draws22,
    ratio=st.sampled_from([(3 / 4, 4 / 3), (1e-3, 0.01), (0.1, 10), (10, 100)]),
)  # fmt: skip
def test_a_crop_lies_inside_and_has_a_pixel_and_an_allowed_shape(
    height: int, width: int, draws: list[float], ratio: tuple[float, float]
) -> None:
    top, left, h, w = crop_box(height, width, draws, ratios=ratio)
    assert 0 <= top < top + h <= height
    assert 0 <= left < left + w <= width
    if min(height, width) >= 2 and ratio == (3 / 4, 4 / 3):
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


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}], ids=str)
def test_a_jpeg_has_pillows_bits(mode: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchcodec")
    by_torchcodec: list[Tensor] = []
    codec = decoding._codec

    def noted(data: Tensor, mode: str) -> Tensor:
        by_torchcodec.append(codec.decode_jpeg(data, mode=mode))
        return by_torchcodec[-1]

    monkeypatch.setattr(decoding, "_codec", SimpleNamespace(decode_jpeg=noted))
    pixels = np.random.default_rng(0).integers(0, 256, (41, 58, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", **options)
    ours = decode(buffer.getvalue())
    theirs = np.array(Image.open(buffer).convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(ours.numpy(), theirs)
    assert [found.shape[0] for found in by_torchcodec] == [{"L": 1, "RGB": 3, "CMYK": 4}[mode]]
    monkeypatch.setattr(decoding, "_codec", None)
    assert torch.equal(decode(buffer.getvalue()), ours)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_truncated_or_foreign_file_is_named_with_its_sample(suffix: str, tmp_path: Path) -> None:
    write_folders(tmp_path, ("a",), 3, (suffix,))
    train, _ = folder_sets(tmp_path, 16, resized_crop=True)
    path = path_of(train, 1)
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
    train, _ = folder_sets(tmp_path, 16)
    monkeypatch.setattr(Path, "read_bytes", denied)  # root may read everything
    named = rf"{path_of(train, 1)} \(sample 1\) cannot be read as an image"
    with pytest.raises(UserError, match=f"{named}: .*Permission denied"):
        train.read(np.array([1]))


@pytest.mark.parametrize("closed", ["train", "val/bee"])
def test_a_folder_without_the_right_to_list_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    write_folders(tmp_path)
    folder, scandir = tmp_path / closed, os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (denied if Path(path) == folder else scandir)(path))
    with pytest.raises(UserError, match=f"{folder} can't be read: Permission denied\n.* give this user the right"):
        folder_sets(tmp_path, 16)


def test_a_picture_that_goes_between_the_listing_and_the_first_step_is_named(tmp_path: Path) -> None:
    write_folders(tmp_path)
    train, _ = folder_sets(tmp_path, 16)
    path_of(train, 4).unlink()
    with pytest.raises(UserError, match=rf"{path_of(train, 4)} \(sample 4\): No such file or directory\n  Put it back"):
        _ = train.fingerprint


def test_the_fingerprint_follows_paths_sizes_and_classes(tmp_path: Path) -> None:
    write_folders(tmp_path)

    def fingerprints() -> tuple[str, ...]:
        return tuple(images.fingerprint for images in folder_sets(tmp_path, 16, resized_crop=True))

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
    def refused(match: str, root: Path = tmp_path) -> None:
        with pytest.raises(UserError, match=match) as caught:
            load(DataConfig(dataset="folder"), root, 0, World.single())
        assert caught.value.remedy

    refused(r"there is no folder .*gone", tmp_path / "gone")
    refused(r"holds no class folders")
    (tmp_path / "Training").mkdir()
    (tmp_path / "Testing").mkdir()
    for folder in ("Training", "Testing"):
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "0.png")
    refused(r"Testing and Training in .* hold no class folders")  # never two classes of these names
    (tmp_path / "Testing/bee").mkdir()
    refused(r"has Testing/ and no folder to train on")
    shutil.rmtree(tmp_path / "Training")
    shutil.rmtree(tmp_path / "Testing")
    write_folders(tmp_path)
    (tmp_path / "validation/ant").mkdir(parents=True)
    refused(r"val and .*validation are both there")
    shutil.rmtree(tmp_path / "validation")
    (tmp_path / "val/cow").mkdir()
    refused(r"val has classes that .*train has not: cow")
    (tmp_path / "val/cow").rename(tmp_path / "val/Ant")
    refused(r"train has not: Ant \(ant there\)")
    (tmp_path / "val/Ant").rename(tmp_path / "val/cow")
    (tmp_path / "train/cow").mkdir()
    refused(r"class folder .*train/cow holds no image")
    shutil.rmtree(tmp_path / "train/cow")
    for path in (tmp_path / "val").rglob("*.*"):
        path.unlink()
    refused(r"val holds no image")


def test_a_class_that_is_only_trained_on_is_no_error(tmp_path: Path) -> None:
    write_folders(tmp_path, ("ant", "bee", "cow"))
    plain = folder_sets(tmp_path, 8)
    shutil.rmtree(tmp_path / "val/bee")
    train, val = folder_sets(tmp_path, 8)
    assert train.notes == (f"note: {tmp_path}/val has no folder for 1 class(es): bee",)
    (tmp_path / "val/bee").mkdir()
    train, empty = folder_sets(tmp_path, 8)
    assert train.notes == ()
    for images in (val, empty):
        assert images.classes == plain[1].classes
        assert images.labels.tolist() == [0] * 3 + [2] * 3
    assert load_part(tmp_path, False).classes == ("ant", "bee", "cow")


def test_the_rule_of_splits_is_told_in_one_line(tmp_path: Path) -> None:
    for names, line in {
        "train val": "",
        "train valid test": "train/ to train on and valid/ to validate on; left alone: test/",
        "Training Testing": "Training/ to train on and Testing/ to validate on",
        "TRAIN Validation": "TRAIN/ to train on and Validation/ to validate on",
        "training_set test_set extra": "training_set/ to train on and test_set/ to validate on; left alone: extra/",
        "train-images eval": "train-images/ to train on and eval/ to validate on",
        "train": "train/ to train on",
        "test .": "the class folders to train on and test/ to validate on",
    }.items():
        root = tmp_path / names
        write_folders(root / "made", count=8)
        for name in names.split():
            shutil.copytree(root / "made/train", root / name, dirs_exist_ok=True)
        shutil.rmtree(root / "made")
        train, val = folder_sets(root, 8)
        assert train.classes == val.classes == ("ant", "bee"), names
        said = [note for note in train.notes if "images:" in note]
        assert said == ([f"images: {root}: {line}"] if line else []), names
        assert len(train) in (16, 16 - len(val)), names
    (tmp_path / "trains/car").mkdir(parents=True)
    (tmp_path / "trains/train").mkdir()
    for i in range(9):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / f"trains/car/{i}.png")
        Image.new("RGB", (8, 8), (0, i, 0)).save(tmp_path / f"trains/train/{i}.png")
    assert folder_sets(tmp_path / "trains", 8)[0].classes == ("car", "train"), "a class of that name"
    (tmp_path / "trains/test").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "trains/test/0.png")
    train, _ = folder_sets(tmp_path / "trains", 8)
    assert train.classes == ("car",)
    assert "left alone: test/, train/" in train.notes[0]


def test_what_systems_leave_is_left_out_everywhere(tmp_path: Path) -> None:
    write_folders(tmp_path, count=6)
    plain = [each.fingerprint for each in folder_sets(tmp_path, 8)]
    files = image_files(tmp_path)
    picture = (tmp_path / "train/ant/0.png").read_bytes()
    for name in (".ipynb_checkpoints", ".Trash", "__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", ".thumbnails"):
        for folder in (tmp_path, tmp_path / "train", tmp_path / "val/bee"):
            (folder / name / "more").mkdir(parents=True)
            (folder / name / "0.png").write_bytes(picture)
            (folder / name / "more/1.png").write_bytes(picture)
    for name in ("Thumbs.db", ".DS_Store", "._0.png", "desktop.ini"):
        (tmp_path / "train/ant" / name).write_bytes(picture)
    sets = folder_sets(tmp_path, 8)
    assert [each.fingerprint for each in sets] == plain
    assert sets[0].notes == ()
    assert [each.left_out for each in sets] == ["8 hidden or a system's", "7 hidden or a system's"]
    assert image_files(tmp_path) == files


def test_names_in_two_normal_forms_are_one_class(tmp_path: Path) -> None:
    composed, apart = (unicodedata.normalize(form, "Caf\u00e9") for form in ("NFC", "NFD"))
    write_folders(tmp_path, (composed, "zoo"))
    (tmp_path / "val" / composed).rename(tmp_path / "val" / apart)
    train, val = folder_sets(tmp_path, 8)
    assert train.classes == val.classes == (composed, "zoo")
    shutil.copytree(tmp_path / "val" / apart, tmp_path / "train" / apart)
    assert folder_sets(tmp_path, 8)[0].labels.tolist() == [0] * 6 + [1] * 3


def test_names_that_are_no_utf8_work(tmp_path: Path) -> None:
    write_folders(tmp_path)
    odd = os.fsdecode(b"caf\xe9")
    for split in ("train", "val"):
        (tmp_path / split / "ant").rename(tmp_path / split / odd)
        (tmp_path / split / odd / "0.png").rename(tmp_path / split / odd / f"{odd}.png")
    train, val = folder_sets(tmp_path, 8)
    assert train.classes == val.classes == ("bee", r"caf\xe9")
    assert train.read(np.arange(6), 0)[0].shape == (6, 3, 8, 8)
    assert pickle.loads(pickle.dumps(train)).fingerprint == train.fingerprint
    places = [train.source.where(i) for i in range(6)]
    assert "\n".join(places).isascii()
    assert "\n".join((*train.classes, *train.notes, train.name)).isascii()
    assert sum(r"caf\xe9" in place for place in places) == 3


ODD = {
    "fifo": ("is no plain file", lambda path, _: os.mkfifo(path)),
    "dangling": ("is a link to nothing", lambda path, _: path.symlink_to("nowhere.png")),
    "loop": ("can't be read: Too many levels of symbolic links", lambda path, _: path.symlink_to(path)),
    "outside": ("outside of", lambda path, other: path.symlink_to(other / "secret.png")),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_image_file_of_the_folder_is_named(tmp_path: Path, kind: str) -> None:
    write_folders(tmp_path / "set", ("cat",), 1)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    message, make = ODD[kind]
    make(tmp_path / "set/train/cat/odd.png", tmp_path)
    with pytest.raises(UserError, match=f"odd.png.*{message}"):
        folder_sets(tmp_path / "set", 8)
    if kind == "outside":
        train, _ = folder_sets(tmp_path / "set", 8, follow_links=True)
        assert len(train) == 2


def test_a_set_behind_a_closed_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", denied)
    with pytest.raises(UserError, match=r"can't be read: Permission denied"):
        folder_sets(tmp_path, 8)


def test_what_lies_beside_the_classes_is_told(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for name in ("notes.txt", ".hidden.png"):
        (tmp_path / "train" / name).touch()
    assert folder_sets(tmp_path, 8)[0].left_out == ""
    for name in ("a.png", "b.PNG"):
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / name)
    os.mkfifo(tmp_path / "train/c.jpg")
    train, val = folder_sets(tmp_path, 8)
    assert (train.left_out, val.left_out) == ("2 .png beside the classes, 1 .jpg beside the classes", "")
    for split in ("train", "val"):
        (tmp_path / split / "eel").symlink_to(tmp_path / "unmounted/eel")
    with pytest.raises(UserError, match=r"train/eel is a link to nothing, and may have been a class") as told:
        folder_sets(tmp_path, 8)
    assert told.value.remedy


def test_links_inside_are_followed_and_those_without_an_end_are_named(tmp_path: Path) -> None:
    write_folders(tmp_path, ("cat",), 1)
    (tmp_path / "train/cat/same.png").symlink_to("0.png")
    train, _ = folder_sets(tmp_path, 8)
    assert [path_of(train, i).name for i in range(2)] == ["0.png", "same.png"]
    (tmp_path / "train/cat/again").symlink_to(tmp_path / "train/cat")
    with pytest.raises(UserError, match="again is a link to a folder above it"):
        folder_sets(tmp_path, 8)
    (tmp_path / "train/cat/again").rename(tmp_path / "gone")
    (tmp_path / "train/cat/up").symlink_to("..")
    with pytest.raises(UserError, match="train/cat/up is a link to a folder above it"):
        folder_sets(tmp_path, 8)


@pytest.mark.parametrize("split", ["train", "Training_Set", "val"])
def test_splits_one_folder_too_deep_are_found(split: str, tmp_path: Path) -> None:
    for name in ("ant", "bee"):
        (tmp_path / "my photos" / split / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "my photos" / split / name / "0.png")
    for use in (lambda: folder_sets(tmp_path, 8), lambda: load_part(tmp_path, False)):
        with pytest.raises(UserError, match="my photos holds the splits") as refused:
            use()
        assert refused.value.remedy == f"Name it: --data-dir '{tmp_path}/my photos'."
