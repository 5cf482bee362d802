"""--dataset tv:NAME: torchvision's classification sets, from small files in their own layouts."""

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from lockstep.config.data import parse_source
from lockstep.data.adapters import _TORCHVISION, Rows, torchvision_sets
from lockstep.data.contents import duplicates
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.data.formats import Pair, folder_sets, md5, path_of, picture_sets, server, write_idx
from tests.ranks import run_ranks

ALONE = World.single()


def load(name: str, root: Path, world: World = ALONE, **data: Any) -> Pair:
    return picture_sets(f"tv:{name}", root, world=world, image_size=16, **data)


def picture(number: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_pets(root: Path) -> None:
    """The layout of OxfordIIITPet: images/NAME_k.jpg, and annotations/trainval.txt and test.txt that list them."""
    images, lists = root / "oxford-iiit-pet/images", root / "oxford-iiit-pet/annotations"
    images.mkdir(parents=True)
    lists.mkdir()
    for part, numbers in (("trainval", (3, 1, 2)), ("test", (4, 5))):
        lines = []
        for number in numbers:
            for label, breed in enumerate(("great_pyrenees", "Abyssinian"), 1):
                picture(10 * number + label).save(images / f"{breed}_{number}.jpg", quality=95)
                lines.append(f"{breed}_{number} {label} {label % 2 + 1} 1")
        (lists / f"{part}.txt").write_text("\n".join(lines) + "\n")


def test_a_set_of_files_reads_as_torchvisions_own(tmp_path: Path) -> None:
    write_pets(tmp_path)
    train, val = load("OxfordIIITPet", tmp_path, resized_crop=True)
    assert (train.classes, len(train), len(val)) == (("Great Pyrenees", "Abyssinian"), 6, 4)
    assert train.notes == ("tv:OxfordIIITPet: to train on its part trainval, to validate on test",)
    divided = load("OxfordIIITPet", tmp_path, val_fraction=0.3)
    assert sum(map(len, divided)) == 6
    assert divided[0].notes[0] == "tv:OxfordIIITPet: to train on its part trainval; left for the end: test"
    assert (train.resized_crop, val.resized_crop) == (True, False)
    theirs = datasets.OxfordIIITPet(tmp_path, split="trainval")
    expected = {str(path): theirs[i] for i, path in enumerate(theirs._images)}
    for sample in range(len(train)):
        image, label = expected[str(path_of(train, sample))]
        assert train.labels[sample] == label
        assert np.array_equal(np.asarray(image), train.decoded(sample).permute(1, 2, 0).numpy())
    assert [train.source.key(i) for i in range(6)] == sorted(
        (train.source.key(i) for i in range(6)), key=lambda key: ("Abyssinian" in key, key)
    )
    again = load("OxfordIIITPet:train=test,val=trainval", tmp_path)
    assert [len(each) for each in again] == [4, 6]


def test_a_set_of_arrays_reads_as_torchvisions_own_and_travels_to_workers(tmp_path: Path) -> None:
    raw = tmp_path / "KMNIST/raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", 30), ("t10k", 20)):
        write_idx(raw / f"{part}-images-idx3-ubyte", rng.integers(0, 256, (count, 28, 28)))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count) % 10)
    train, val = load("KMNIST", tmp_path)
    assert isinstance(train.source, Rows)
    assert (train.classes[0], len(train), len(val)) == ("o", 30, 20)
    theirs = datasets.KMNIST(tmp_path, train=True)
    for sample in (0, 7, 29):
        pixels = train.decoded(sample)
        assert torch.equal(pixels, theirs.data[sample].expand(3, -1, -1))
        assert train.labels[sample] == theirs[sample][1]
    ids = np.arange(5)
    assert torch.equal(pickle.loads(pickle.dumps(train)).read(ids, None)[0], train.read(ids, None)[0])
    assert duplicates(train, val, "auto", ALONE) == [], "it would have to read all of them"
    before = train.fingerprint
    assert before == load("KMNIST", tmp_path)[0].fingerprint
    write_idx(raw / "train-images-idx3-ubyte", rng.integers(0, 256, (30, 28, 28)))
    assert load("KMNIST", tmp_path)[0].fingerprint != before


def test_a_set_of_one_part_is_divided(tmp_path: Path) -> None:
    for name in ("Forest", "River"):
        (tmp_path / "eurosat/2750" / name).mkdir(parents=True)
        for number in range(20):
            picture(number + 100 * len(name)).save(tmp_path / "eurosat/2750" / name / f"{number}.ppm")
    assert load("EuroSAT", tmp_path)[1].fingerprint == load("EuroSAT", tmp_path, val_fraction=0.2)[1].fingerprint
    train, val = load("EuroSAT", tmp_path, val_fraction=0.3)
    flat = folder_sets(tmp_path / "eurosat/2750", 16, val_fraction=0.3)
    for ours, theirs in zip((train, val), flat, strict=True):
        ids = np.arange(len(ours))
        assert all(torch.equal(a, b) for a, b in zip(ours.read(ids, None), theirs.read(ids, None), strict=True))


def downloaded(world: World, root: str, address: str, sums: dict[str, str]) -> Any:
    datasets.OxfordIIITPet._RESOURCES = tuple((address + name, total) for name, total in sums.items())
    train, val = load("OxfordIIITPet", Path(root), world)
    return train.fingerprint, val.fingerprint, len(train)


def test_one_process_downloads_with_checksums_while_the_others_wait(tmp_path: Path) -> None:
    write_pets(tmp_path / "made")
    (tmp_path / "served").mkdir()
    sums = {}
    for name in ("images", "annotations"):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(tmp_path / "made/oxford-iiit-pet" / name, name)
        (tmp_path / "served" / f"{name}.tar.gz").write_bytes(packed.getvalue())
        sums[f"{name}.tar.gz"] = md5(packed.getvalue())
    with server(tmp_path / "served") as (address, got):
        found = run_ranks(downloaded, 2, str(tmp_path / "data"), address, sums, timeout=240)
    made = [each.fingerprint for each in load("OxfordIIITPet", tmp_path / "made")]
    assert found == [(*made, 6)] * 2
    assert {got.count(name) for name in sums} <= {1, 2}, "torchvision looks first; a second process would look again"


def test_what_can_not_be_had_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.OxfordIIITPet, "_RESOURCES", (("http://127.0.0.1:9/images.tar.gz", "0" * 32),))
    with pytest.raises(UserError, match="tv:OxfordIIITPet is not in") as caught:
        load("OxfordIIITPet", tmp_path)
    assert "download=True" in caught.value.remedy
    for name, match, remedy in (
        ("OxfordIITPet", "unknown classification set of torchvision: 'OxfordIITPet'", "OxfordIIITPet"),
        ("flowers102", "unknown classification set", "Flowers102"),
        ("CIFAR10", "by pickle", "--dataset cifar10"),
        ("VOCDetection", "unknown classification set", ""),
        ("Nope", "unknown classification set", "Known: CLEVRClassification, "),
        ("ImageNet", "by pickle", "lockstep train imagenet --data-dir"),
        ("KMNIST:val=test", "has no parts to choose from", "Leave"),
    ):
        with pytest.raises(UserError, match=match) as caught:
            load(name, tmp_path)
        assert remedy in caught.value.remedy


def test_the_names_are_torchvisions() -> None:
    assert set(_TORCHVISION) == set(torchvision_sets())


def test_options_stand_behind_the_name() -> None:
    assert parse_source("hf:user/set:image=a,label=b", ("image", "label")) == ("user/set", {"image": "a", "label": "b"})
