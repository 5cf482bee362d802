"""--val-fraction: which pictures are validated on, by what they hold and nothing else."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config import Config, DataConfig
from lockstep.data import contents as hashing
from lockstep.data.contents import duplicates
from lockstep.data.folders import load_part
from lockstep.data.picture_set import Files, PictureSet
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.data.formats import Pair, folder_sets, picture_sets, write_folders
from tests.ranks import run_ranks

ALONE = World.single()


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def pictures(count: int = 40, classes: tuple[str, ...] = ("ant", "bee")) -> dict[str, bytes]:
    """Path -> content; nothing here decodes them."""
    return {f"{name}/{i}.png": f"{name} {i}".encode() for name in classes for i in range(count)}


def divide(root: Path, fraction: float = 0.2, world: World = ALONE) -> Pair:
    return picture_sets("folder", root, world=world, val_fraction=fraction, image_size=8)


def held(images: PictureSet) -> list[tuple[str, int]]:
    return list(zip(map(images.source.key, range(len(images))), images.labels.tolist(), strict=True))


TWICE = {
    "train/ant/1.png": b"first",
    "train/ant/2.png": b"other",  # of the same size
    "train/ant/again.png": b"first",
    "train/bee/1.png": b"first",
    "train/bee/2.png": b"a bumblebee",
    "val/ant/x.png": b"first",
    "val/ant/y.png": b"no twin",
    "val/bee/z.png": b"a bumblebee",
}


def told(world: World, root: str, look: str = "auto") -> list[str]:
    return duplicates(*folder_sets(Path(root), 8), look, world)


def described(world: World, root: str, twice: str, others: str = "") -> Any:
    train, val = divide(Path(root), world=world)
    refused = ""
    if others:
        with pytest.raises(UserError) as caught:
            divide(Path(others if world.rank else root), world=world)
        refused = caught.value.message
    return held(train), held(val), train.fingerprint, val.fingerprint, train.notes, told(world, twice), refused


def number(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def by_hand(files: dict[str, bytes], fraction: float) -> set[str]:
    """The paths to validate on: by their content, and where a class would lack a side the nearest content moves."""
    limit, moved = fraction * 2**64, set()
    for name in {path.split("/")[0] for path in files}:
        own = sorted({number(content) for path, content in files.items() if path.split("/")[0] == name})
        if own[-1] < limit:
            moved.add(own[-1])
        elif own[0] >= limit and len(own) > 1:
            moved.add(own[0])
    return {path for path, content in files.items() if (number(content) < limit) != (number(content) in moved)}


def test_the_split_is_the_hash_of_the_content_on_any_number_of_ranks(tmp_path: Path) -> None:
    root, files = tmp_path / "set", pictures()
    write(root, files)
    train, val = divide(root)
    chosen = by_hand(files, 0.2)
    assert chosen == {name for name, content in files.items() if number(content) < 0.2 * 2**64}
    assert {key for key, _ in held(val)} == chosen
    assert {key for key, _ in held(train)} == set(files) - chosen
    assert [label for _, label in held(train)] == sorted(label for _, label in held(train))
    bees = sum(name.startswith("bee") for name in chosen)
    (note,) = train.notes
    assert note.endswith(f"ant {40 - len(chosen) + bees} + {len(chosen) - bees}, bee {40 - bees} + {bees}")
    write(tmp_path / "twice", TWICE)
    alone = described(ALONE, str(root), str(tmp_path / "twice"))
    assert len(alone[-2]) == 2
    write(tmp_path / "other", pictures(41))
    for theirs in run_ranks(described, 3, str(root), str(tmp_path / "twice"), str(tmp_path / "other"), timeout=240):
        assert tuple(theirs[:-1]) == alone[:-1]
        assert "80 files on rank 0 and 82 on rank 1" in theirs[-1]


@settings(max_examples=20)
@given(st.data())
def test_no_picture_changes_sides(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """However files are added, renamed, moved to another class, copied or listed."""
    root, files = tmp_path_factory.mktemp("moved"), pictures(30)
    kept = data.draw(st.sets(st.sampled_from(sorted(files)), min_size=20))
    moved = {f"{data.draw(st.sampled_from(['ant', 'bee']))}/new-{i}.png": files[name] for i, name in enumerate(kept)}
    added = {f"{name}/{i}.jpg": data.draw(st.binary(max_size=8)) for i in range(3) for name in ("ant", "bee")}
    write(root, moved | added)
    listed, backwards = os.scandir, data.draw(st.booleans())
    with mock.patch("os.scandir", lambda path: list(listed(path))[:: -1 if backwards else 1]):
        train, val = divide(root, 0.3)
    assert {key for key, _ in held(val)} == by_hand(moved | added, 0.3)
    assert {key for key, _ in held(train)} == {*moved, *added} - by_hand(moved | added, 0.3)


def test_a_larger_fraction_keeps_what_a_smaller_one_chose(tmp_path: Path) -> None:
    write(tmp_path, pictures())
    small, large = ({key for key, _ in held(divide(tmp_path, fraction)[1])} for fraction in (0.1, 0.4))
    assert small < large


def test_train_without_val_is_divided_and_test_left_for_the_end(tmp_path: Path) -> None:
    write(tmp_path / "flat", pictures())
    write(tmp_path / "set/train", pictures())
    write(tmp_path / "set/test", pictures(3))
    flat, deep = divide(tmp_path / "flat"), divide(tmp_path / "set")
    assert [held(each) for each in flat] == [held(each) for each in deep]
    assert [each.fingerprint for each in flat] == [each.fingerprint for each in deep]
    assert deep[0].notes[0] == f"images: {tmp_path / 'set'}: train/ to train on; left alone: test/"
    write(tmp_path / "set/val", pictures(3))
    with pytest.raises(UserError, match="val is there to validate on already"):
        divide(tmp_path / "set")
    write(tmp_path / "trains", pictures(classes=("car", "train")))  # a class of that name
    assert divide(tmp_path / "trains")[0].classes == ("car", "train")


def test_a_class_has_an_image_on_both_sides_where_it_has_two(tmp_path: Path) -> None:
    files = pictures() | {"wasp/1.png": b"1", "yak/1.png": b"one", "yak/2.png": b"two"}
    write(tmp_path, files)
    for fraction in (1e-9, 0.2, 0.999999):
        train, val = divide(tmp_path, fraction)
        assert {key for key, _ in held(val)} == by_hand(files, fraction)
        for images, lacks in ((train, ()), (val, ("wasp",))):
            assert {key.split("/")[0] for key, _ in held(images)} == {"ant", "bee", "wasp", "yak"} - {*lacks}
    write(tmp_path / "one", {"ant/1.png": b"1", "bee/1.png": b"2"})
    with pytest.raises(UserError, match="has no class with two different images"):
        divide(tmp_path / "one")


def test_class_folders_alone_are_divided_without_a_flag(tmp_path: Path) -> None:
    write(tmp_path, pictures())
    train, val = folder_sets(tmp_path, 8)
    assert train.fingerprint == divide(tmp_path, 0.2)[0].fingerprint
    (note,) = train.notes
    assert note.startswith(f"validation: {len(val)} of 80 images, chosen by their content (--val-fraction 0.2); ant ")


@pytest.mark.parametrize("dataset", ["cifar10", "my.module:sets"])
def test_sets_with_a_validation_part_are_not_divided(dataset: str) -> None:
    with pytest.raises(UserError, match=f"--val-fraction .* with --dataset {dataset}"):
        Config(data=DataConfig(dataset=dataset, val_fraction=0.1))


def test_hashes_are_kept_and_a_changed_file_is_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "set"
    write(root, pictures())
    divide(root)
    assert not (tmp_path / "cache").exists(), "what takes no time is not kept"
    monkeypatch.setattr(hashing, "_WORTH_S", -1.0)
    before = [held(each) for each in divide(root)]
    (file,) = (tmp_path / "cache/lockstep/contents").iterdir()
    read: list[int] = []
    read_file = Files.read

    def noted(files: Files, sample: int) -> bytes:
        read.append(sample)
        return read_file(files, sample)

    monkeypatch.setattr(Files, "read", noted)
    assert [held(each) for each in divide(root)] == before
    assert not read
    kept = root / "ant/3.png"
    stated = kept.stat()
    content = b"ant X"
    assert len(content) == stated.st_size
    kept.write_bytes(content)
    os.utime(kept, ns=(stated.st_atime_ns, stated.st_mtime_ns))  # as rsync would: the same size and time
    train, val = divide(root)
    assert len(read) == 1
    assert ("ant/3.png" in {key for key, _ in held(val)}) is (number(content) < 0.2 * 2**64)
    for harmed in (b"", file.read_bytes()[:-8], b"\0" * 64):
        file.write_bytes(harmed)
        read.clear()
        divide(root)
        assert len(read) == 80
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder")
    assert len(divide(root)[0]) == len(train)


def test_the_parts_decode_as_the_whole_does(tmp_path: Path) -> None:
    write_folders(tmp_path, count=10, suffixes=(".ppm",))  # alike from every version of its encoder
    shutil.rmtree(tmp_path / "val")
    train, val = divide(tmp_path, 0.4)
    whole = replace(load_part(tmp_path, False), size=8)
    keys = [whole.source.key(i) for i in range(len(whole))]
    for part in (train, val):
        at = np.array([keys.index(part.source.key(i)) for i in range(len(part))])
        for ours, theirs in zip(part.read(np.arange(len(part)), None), whole.read(at, None), strict=True):
            assert bool((ours == theirs).all())
