"""Kept pictures: the same bits with and without, on any number of processes, and whatever becomes of the files."""

import argparse
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.config import Config, DataConfig, Execution, ModelConfig
from lockstep.data import cache as module
from lockstep.data import decoding
from lockstep.data.cache import Cache, cache_in, checksum_of, fill, keep, key_of
from lockstep.data.picture_set import PictureSet
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.monitoring.journal import read
from lockstep.training.assemble import eval_loader, load_data, train_loader
from lockstep.training.loop import train
from tests.data.formats import Pair, path_of, picture_sets
from tests.data.photos import photo, turned
from tests.ranks import run_ranks

SINGLE = World.single()
BROKEN = ("a/3.jpg", "b/0.jpg")  # of 36, where `harm` has been


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for split, count in (("train", 18), ("val", 4)):
        for seed, name in enumerate("ab"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                image = photo(90 + i, 70 + seed, 100 * seed + i)
                image.save(root / split / name / f"{i}.jpg", exif=turned(1 + i % 8))
    return root


def harm(root: Path) -> None:
    for name, data in zip(BROKEN, (b"", b"\xff\xd8\xff torn"), strict=True):
        (root / "train" / name).write_bytes(data)


Way = tuple[Path, str, int, dict[str, Any]]  # folder, --cache, --workers, and of the data


SHRUNK: dict[str, Any] = {"image_size": 16, "decode_size": 24, "resized_crop": True}


def asked(root: Path, cache: str = "", workers: int = 0, **data: Any) -> Config:
    execution = Execution(data_dir=str(root), cache=cache, workers=workers, eval_batch_size=3)
    return Config(batch_size=8, data=DataConfig(dataset="folder", **SHRUNK, **data), execution=execution)


def sets(root: Path) -> Pair:
    return picture_sets("folder", root, **SHRUNK)


def seen(world: World, config: Config) -> dict[str, list[str]]:
    """Digest of what the network gets of each sample in two epochs and in evaluation, over all ranks."""
    train_set, val_set = load_data(config, world)
    train, val = train_loader(config, train_set, world), eval_loader(config, val_set, world)
    found: dict[str, list[str]] = {
        "notes": [note for each in (train_set, val_set) for note in getattr(each, "notes", ())]
    }
    for epoch in range(2):
        for batch in train.epoch(epoch):
            for sample, image, label in zip(batch.ids.tolist(), batch.images, batch.labels.tolist(), strict=True):
                found[f"{epoch} {sample}"] = [digest(image), str(label)]
    for chunk, images, labels in val:
        found[f"val {chunk}"] = [digest(images), str(labels.tolist())]
    return {name: value for each in world.gather(found) for name, value in each.items()}


def digest(image: Tensor) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def seen_in_every_way(world: World, home: str, ways: list[Way]) -> list[Any]:
    os.environ["XDG_CACHE_HOME"] = home
    return [seen(world, asked(root, cache, workers, **data)) for root, cache, workers, data in ways]


@pytest.mark.slow
def test_the_same_bits_with_and_without_a_cache_on_any_number_of_ranks(photos: Path, tmp_path: Path) -> None:
    """Broken ones are left out as if they were not there."""
    plain = seen(SINGLE, asked(photos))
    assert len(plain) == 1 + 2 * 36 + 3
    harmed, cut = (Path(shutil.copytree(photos, tmp_path / name)) for name in ("harmed", "cut"))
    harm(harmed)
    for name in BROKEN:
        (cut / "train" / name).unlink()
    without = seen(SINGLE, asked(cut))
    without["notes"] = [
        f"note: --skip-broken leaves out 2 of 36 pictures of {harmed}/train: "
        f"{harmed}/train/a/3.jpg, {harmed}/train/b/0.jpg"
    ]
    for n in (1, 3):
        home = tmp_path / f"home{n}"
        home.mkdir()
        kept, skipped = str(home / "dir"), {"skip_broken": True}
        ways: list[Way] = [(photos, kept, 0, {}), (photos, kept, 2, {}), (photos, "auto", 0, {})]
        ways += [(harmed, str(home / "harmed"), 0, skipped), (harmed, "", 0, skipped)]
        job = str(home), ways
        ranks = [seen_in_every_way(SINGLE, *job)] if n == 1 else run_ranks(seen_in_every_way, n, *job, timeout=300)
        assert ranks == [[plain] * 3 + [without] * 2] * n
        assert [len([*home.glob(f"{each}/*/block-*")]) for each in ("dir", "lockstep/pictures")] == [4, 8]  # of both


def test_without_the_flag_all_broken_pictures_are_named_before_training(photos: Path, tmp_path: Path) -> None:
    harm(photos)
    said = r"2 of 36 pictures can't be decoded: .*a/3.jpg, .*b/0.jpg; the first"
    with pytest.raises(UserError, match=said) as caught:
        load_data(asked(photos, str(tmp_path / "kept")), SINGLE)
    assert "--skip-broken" in caught.value.remedy
    train, _ = sets(photos)
    with pytest.raises(UserError, match=r"3.jpg \(sample 11\) cannot be read") as caught:
        train.read(np.array([11]))
    assert "--skip-broken" in caught.value.remedy


def test_what_is_left_out_of_either_set_is_said_at_the_start(photos: Path, tmp_path: Path) -> None:
    harm(photos)
    (photos / "val/b/1.jpg").write_bytes(b"")
    config = replace(asked(photos, skip_broken=True), epochs=1, model=ModelConfig(model="digits_net"))
    train(config, SINGLE, tmp_path / "run")
    start: Any = read(tmp_path / "run/journal.jsonl")[0]
    said = [note for note in start["notes"] if "--skip-broken" in note]
    assert [note.rpartition(": ")[0] for note in said] == [
        f"note: --skip-broken leaves out {count} pictures of {photos}/{part}"
        for count, part in (("2 of 36", "train"), ("1 of 8", "val"))
    ]


def test_what_a_search_for_broken_pictures_found_is_kept(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    harm(photos)
    found = [len(each) for each in keep(sets(photos), "", True, SINGLE)]

    monkeypatch.setattr(module, "_decoded", Mock(side_effect=MemoryError))  # which no picture is blamed for
    assert [len(each) for each in keep(sets(photos), "", True, SINGLE)] == found == [34, 8]
    (photos / "train/a/3.jpg").write_bytes(b"mended, in another size")
    with pytest.raises(MemoryError):
        keep(sets(photos), "", True, SINGLE)


def test_a_class_without_a_sound_picture_is_refused(photos: Path, tmp_path: Path) -> None:
    for path in (photos / "val/b").iterdir():
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"val: no picture of class b can be decoded"):
        keep(sets(photos), str(tmp_path / "kept"), True, SINGLE)


@given(st.lists(st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path: Path, shapes: list[tuple[int, int] | None]) -> None:
    draws = torch.Generator().manual_seed(len(shapes))
    folder = tmp_path / hashlib.sha256(repr(shapes).encode()).hexdigest()
    folder.mkdir(exist_ok=True)
    pictures = [
        None if shape is None else torch.randint(0, 256, (3, *shape), generator=draws, dtype=torch.uint8)
        for shape in shapes
    ]
    cache = Cache(folder, "k" * 32, len(pictures), 16)
    for number in range(cache.blocks):
        assert cache.fault(number)
        cache.write(number, [pictures[i] for i in cache.members(number)])
        assert not cache.fault(number)
    sizes = [row[:2].tolist() for number in range(cache.blocks) for row in cache.mapped(number)[0]]
    assert sizes == [list(shape or (0, 0)) for shape in shapes]
    for number, picture in enumerate(pictures):
        if picture is not None:
            assert torch.equal(cache.picture(number), picture)


def filled(root: Path, below: Path) -> tuple[PictureSet, Cache]:
    train, _ = sets(root)
    cache = cache_in(below, train, key_of(train))
    fill(train, cache, SINGLE)
    return train, cache


def forged(raw: bytes) -> bytes:
    """With another height of the first picture."""
    start = 8 + int.from_bytes(raw[:8], "little")
    at = start + json.loads(raw[8:start])["table"]["data_offsets"][0]
    return raw[:at] + b"\7" + raw[at + 1 :]


HEADS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "torn": ("torn", lambda raw: raw[: len(raw) // 2]),
    "torn in its head": ("torn", lambda raw: raw[:100]),
    "empty": ("torn", lambda _: b""),
    "longer": ("torn", lambda raw: raw + b"\0" * 8),
    "foreign": ("torn", lambda raw: b"\x89PNG" + raw[4:]),
    "of another place": ("of another cache", lambda raw: raw.replace(b" 1 ", b" 2 ", 1)),
    "forged": ("table is damaged", forged),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_damaged_file_is_told_and_made_again(
    kind: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, cache = filled(photos, tmp_path / "kept")
    whole = cache.path(1).read_bytes()
    others = {path: path.stat().st_mtime_ns for path in cache.folder.glob("block*") if path != cache.path(1)}
    message, damage = HEADS[kind]
    cache.path(1).unlink()  # a map of it stays good
    cache.path(1).write_bytes(damage(whole))
    assert message in (fault := cache.fault(1))
    fill(train, cache, SINGLE)
    assert f"{cache.path(1)}: {fault}; it is made again" in capsys.readouterr().err
    assert cache.path(1).read_bytes() == whole
    assert others == {path: path.stat().st_mtime_ns for path in others}


def test_pixels_that_changed_are_found_when_they_are_read(photos: Path, tmp_path: Path) -> None:
    train, cache = filled(photos, tmp_path / "kept")
    raw = bytearray(cache.path(0).read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + json.loads(raw[8:start])["pixels"]["data_offsets"][1] - 1000] ^= 1
    cache.path(0).write_bytes(raw)
    kept = replace(train, cache=replace(cache, each=cache.each))
    with pytest.raises(UserError, match=r"block-000000.safetensors: picture 15 of it was damaged") as caught:
        kept.read(np.arange(16))
    assert caught.value.remedy


@given(st.lists(st.integers(0, 255), min_size=8, max_size=80), st.integers(0, 79), st.integers(1, 255))
def test_no_changed_byte_leaves_the_checksum(values: list[int], place: int, change: int) -> None:
    stored = np.array(values + [0] * (-len(values) % 8), np.uint8)
    harmed = stored.copy()
    harmed[place % len(stored)] ^= change
    assert checksum_of(stored) != checksum_of(harmed)


def test_a_killed_build_goes_on(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = sets(photos)
    cache = cache_in(tmp_path, train, key_of(train))
    write = Cache.write

    def killed(self: Cache, number: int, *rest: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt
        write(self, number, *rest)

    monkeypatch.setattr(Cache, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        fill(train, cache, SINGLE)
    made = {number: cache.path(number).stat().st_mtime_ns for number in (0, 1)}
    assert cache.fault(2) == "it is missing"
    monkeypatch.setattr(Cache, "write", write)
    fill(train, cache, SINGLE)
    assert made == {number: cache.path(number).stat().st_mtime_ns for number in (0, 1)}
    assert {path.name for path in cache.folder.iterdir()} == {f"block-00000{n}.safetensors" for n in range(3)}


def test_a_stop_and_a_full_disk_end_a_build_at_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, _ = sets(photos)
    decoded: list[int] = []
    decode = decoding.decode

    def stopped(data: bytes, short: int) -> Tensor:
        decoded.append(len(data))
        if len(decoded) == 2:
            raise MemoryError
        time.sleep(0.1 * (len(decoded) > 2))
        return decode(data, short)

    monkeypatch.setattr(module, "decode", stopped)
    monkeypatch.setattr(module, "_FEWEST", 36)  # all in one block,
    monkeypatch.setattr(module, "cores", lambda: 1)  # which would take three seconds
    with pytest.raises(MemoryError):
        fill(train, cache_in(tmp_path, train, key_of(train)), SINGLE)
    assert len(decoded) < 36
    monkeypatch.undo()

    monkeypatch.setattr(Cache, "write", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(UserError, match=r"can't write the cache .*: No space left") as caught:
        fill(train, cache_in(tmp_path, train, key_of(train)), SINGLE)
    assert "Free some space" in caught.value.remedy


def test_a_rank_helps_the_others_from_their_ends(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is slow, whoever is done makes what it has not begun; nothing is made twice."""
    train, _ = sets(photos)
    monkeypatch.setattr(module, "_FEWEST", 4)  # 9 blocks
    cache = cache_in(tmp_path, train, key_of(train))
    written: list[int] = []
    write = Cache.write

    def noted(self: Cache, number: int, pictures: Any) -> None:
        written.append(number)
        write(self, number, pictures)

    monkeypatch.setattr(Cache, "write", noted)
    monkeypatch.setattr(World, "barrier", lambda _: None)
    fill(train, cache, World(1, 3, 1, 3, torch.device("cpu"), "none"))
    assert written == [3, 4, 5, 2, 1, 0, 8, 7, 6]
    fill(train, cache, World(0, 3, 0, 3, torch.device("cpu"), "none"))
    assert len(written) == 9


def test_the_key_follows_files_sizes_and_decoder(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = sets(photos)
    keys = [key_of(train), key_of(val), key_of(replace(train, decode_size=25))]
    assert key_of(sets(photos)[0]) == keys[0]
    path = path_of(train, 3)
    stated = path.stat()
    other = bytearray(path.read_bytes())
    other[-9] ^= 1
    path.write_bytes(other)  # of the same size
    os.utime(path, ns=(stated.st_atime_ns, stated.st_mtime_ns + 1))
    keys.append(key_of(sets(photos)[0]))
    monkeypatch.setenv("LOCKSTEP_DECODE_MIB", "2000")  # what was refused may be read with it
    keys.append(key_of(sets(photos)[0]))
    other_code = tmp_path / "decoding.py"  # which reads what this one could not
    other_code.write_text("")
    monkeypatch.setattr(decoding, "__file__", str(other_code))
    keys.append(key_of(sets(photos)[0]))
    monkeypatch.setattr(module, "decode", lambda *_: torch.zeros(3, 2, 2))  # a decoder that rounds otherwise
    keys.append(key_of(sets(photos)[0]))
    assert len({*keys}) == len(keys)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = sets(photos)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    most = sum(map(len, both)) * 4 * 24 * 24
    room = {"free": most}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: argparse.Namespace(**room))
    with pytest.raises(
        UserError, match=r"--cache .*small: up to 0 MiB of pictures, and .*small has room for 0"
    ) as caught:
        keep(both, str(tmp_path / "small"), False, SINGLE)
    assert "leave --cache out" in caught.value.remedy
    assert keep(both, "auto", False, SINGLE) == both
    assert "they are not kept" in capsys.readouterr().err
    assert not [*tmp_path.glob("**/block*")]
    room["free"] = 2 * most
    kept = keep(both, "auto", False, SINGLE)
    held = sum(path.stat().st_size for path in tmp_path.glob("home/lockstep/pictures/*/block*"))
    assert held < 1.1 * most  # with the heads of such small files
    assert kept != both
    assert "they are not kept" not in capsys.readouterr().err
    room["free"] = 0
    assert keep(both, "auto", False, SINGLE) != both, "it is there already"
    assert capsys.readouterr().err == ""


def test_auto_removes_what_nobody_has_used_for_a_month(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old, new = tmp_path / "lockstep/pictures/old", tmp_path / "lockstep/pictures/new"
    for folder, days in ((old, 31), (new, 29)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - days * 86400,) * 2)
    keep(sets(photos), str(tmp_path / "dir"), False, SINGLE)
    assert old.exists()
    keep(sets(photos), "auto", False, SINGLE)
    assert (old.exists(), new.exists()) == (False, True)


def test_settings_without_sense_are_refused(photos: Path) -> None:
    with pytest.raises(UserError, match="--cache ram with --decode-size 0: nothing shrinks"):
        Config(execution=Execution(cache="ram"))
    for config in (
        Config(data=DataConfig(skip_broken=True)),
        Config(data=DataConfig(dataset="digits", skip_broken=True), execution=Execution(data_dir=str(photos))),
    ):
        with pytest.raises(UserError, match=r"--skip-broken: .* holds no picture files"):
            load_data(config, SINGLE)
