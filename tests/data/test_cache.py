"""Kept pictures: the same bits with and without, on any number of processes, and whatever becomes of the files."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.config import Config, DataConfig, Execution
from lockstep.data import cache_build, cache_place
from lockstep.data.cache import Cache, checksum_of
from lockstep.data.cache_build import cache_in, fill, key_of
from lockstep.data.cache_place import choose, memory, sweep, use
from lockstep.data.folder import FolderSet
from lockstep.data.keeping import keep
from lockstep.data.sources import load
from lockstep.errors import UserError
from lockstep.processes.world import World
from lockstep.training.assemble import eval_loader, load_data, train_loader
from tests.data.photos import photo, turned
from tests.ranks import run_ranks
from tests.subprocesses import run_lockstep

SINGLE = World.single()
BROKEN = ("a/3.jpg", "b/0.jpg")  # of 36, where `harm` has been


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


def write_photos(root: Path, each: int = 18) -> Path:
    for split, count in (("train", each), ("val", 4)):
        for seed, name in enumerate("ab"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                image = photo(90 + i, 70 + seed, 100 * seed + i)
                image.save(root / split / name / f"{i}.jpg", exif=turned(1 + i % 8))
    return root


def harm(root: Path) -> None:
    for name, data in zip(BROKEN, (b"", b"\xff\xd8\xff torn"), strict=True):
        (root / "train" / name).write_bytes(data)


def asked(root: Path, cache: str = "", workers: int = 0, **data: Any) -> Config:
    chosen = DataConfig(dataset="folder", image_size=16, decode_size=24, resized_crop=True, **data)
    execution = Execution(data_dir=str(root), cache=cache, workers=workers, eval_batch_size=3)
    return Config(batch_size=8, data=chosen, execution=execution)


def sets(root: Path, **data: Any) -> tuple[FolderSet, FolderSet]:
    train, val = load(asked(root, **data).data, root, 0, SINGLE)
    assert isinstance(train, FolderSet)
    assert isinstance(val, FolderSet)
    return train, val


def seen(world: World, config: Config) -> dict[str, list[str]]:
    """Digest of what the network gets of each sample in two epochs and in evaluation, over all ranks."""
    train_set, val_set = load_data(config, world)
    train, val = train_loader(config, train_set, world), eval_loader(config, val_set, world)
    found: dict[str, list[str]] = {
        "notes": [note for each in (train_set, val_set) for note in getattr(each, "notes", ())]
    }
    for epoch in range(2):
        for batch in train.epoch(epoch):
            mine = np.concatenate([batch.ids[:0], *(batch.ids[piece.rows] for piece in batch.pieces)])
            for sample, image, label in zip(mine.tolist(), batch.images, batch.labels.tolist(), strict=True):
                found[f"{epoch} {sample}"] = [digest(image), str(label)]
    for chunk, images, labels in val:
        found[f"val {chunk}"] = [digest(images), str(labels.tolist())]
    return {name: value for each in world.gather(found) for name, value in each.items()}


def digest(image: Tensor) -> str:
    return hashlib.sha256(image.numpy().tobytes()).hexdigest()


def seen_in_every_way(world: World, root: str, home: str, ways: list[tuple[str, int, dict[str, Any]]]) -> list[Any]:
    cache_place._SHARED = Path(home)
    os.environ["XDG_CACHE_HOME"] = home
    return [seen(world, asked(Path(root), cache, workers, **data)) for cache, workers, data in ways]


def test_the_same_bits_with_and_without_a_cache_on_any_number_of_ranks(photos: Path, tmp_path: Path) -> None:
    plain = seen(SINGLE, asked(photos))
    assert len(plain) == 1 + 2 * 36 + 3
    for n in (1, 2, 3):
        home = tmp_path / f"home{n}"
        home.mkdir()
        ways: list[tuple[str, int, dict[str, Any]]] = [
            (str(home / "dir"), 0, {}),
            (str(home / "dir"), 2, {}),
            ("ram", 0, {}),
        ]
        for found in run_ranks(seen_in_every_way, n, str(photos), str(home), ways, timeout=300):
            assert all(each == plain for each in found)
        assert len([*home.glob("dir/*/block-*")]) == 3 + 1


def test_broken_pictures_are_left_out_as_if_they_were_not_there(photos: Path, tmp_path: Path) -> None:
    without = Path(shutil.copytree(photos, tmp_path / "without"))
    harm(photos)
    for name in BROKEN:
        (without / "train" / name).unlink()
    plain = seen(SINGLE, asked(without))
    home = tmp_path / "home"
    home.mkdir()
    ways: list[tuple[str, int, dict[str, Any]]] = [
        (str(home / "dir"), 0, {"skip_broken": True}),
        ("", 0, {"skip_broken": True}),
    ]
    for n in (1, 2, 3):
        for found in run_ranks(seen_in_every_way, n, str(photos), str(home), ways, timeout=300):
            for each in found:
                assert each.pop("notes") == [
                    f"note: --skip-broken leaves out 2 of 36 pictures of {photos}/train: "
                    f"{photos}/train/a/3.jpg, {photos}/train/b/0.jpg"
                ]
                assert each == {name: value for name, value in plain.items() if name != "notes"}


def test_without_the_flag_all_broken_pictures_are_named_before_training(photos: Path, tmp_path: Path) -> None:
    harm(photos)
    with pytest.raises(
        UserError, match=r"2 of 36 pictures can't be decoded: .*a/3.jpg, .*b/0.jpg; the first"
    ) as caught:
        load_data(asked(photos, str(tmp_path / "kept")), SINGLE)
    assert "--skip-broken" in caught.value.remedy
    train, _ = sets(photos)
    with pytest.raises(UserError, match=r"3.jpg \(sample 11\) cannot be read") as caught:
        train.read(np.array([11]))
    assert "--skip-broken" in caught.value.remedy


def test_what_a_search_for_broken_pictures_found_is_kept(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    harm(photos)
    found = [len(each) for each in keep(sets(photos), "", True, SINGLE)]

    def decoded_again(*_: object) -> None:
        raise MemoryError  # which no picture is blamed for

    monkeypatch.setattr(FolderSet, "pixels", decoded_again)
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
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_written_is_read(tmp_path: Path, shapes: list[tuple[int, int] | None]) -> None:
    draws = torch.Generator().manual_seed(len(shapes))
    folder = tmp_path / hashlib.sha256(repr(shapes).encode()).hexdigest()
    folder.mkdir(exist_ok=True)
    pictures = [
        None if shape is None else torch.randint(0, 256, (3, *shape), generator=draws, dtype=torch.uint8)
        for shape in shapes
    ]
    cache = Cache(folder, b"k" * 32, len(pictures), 16)
    for number in range(cache.blocks):
        assert cache.fault(number)
        cache.write(number, [pictures[i] for i in cache.members(number)], durable=False)
        assert not cache.fault(number)
    assert cache.sizes().tolist() == [list(shape or (0, 0)) for shape in shapes]
    for number, picture in enumerate(pictures):
        if picture is not None:
            assert torch.equal(cache.picture(number), picture)


def filled(root: Path, below: Path) -> tuple[FolderSet, Cache]:
    train, _ = sets(root)
    cache = cache_in(below, train, key_of(train))
    fill(train, cache, SINGLE, durable=True)
    return train, cache


HEADS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "torn": ("torn", lambda raw: raw[: len(raw) // 2]),
    "torn in its head": ("torn", lambda raw: raw[:100]),
    "empty": ("torn", lambda _: b""),
    "longer": ("torn", lambda raw: raw + b"\0" * 8),
    "foreign": ("no file of a cache", lambda raw: b"\x89PNG" + raw[4:]),
    "of another set": ("of another cache", lambda raw: raw[:20] + b"x" + raw[21:]),
    "of another place": ("of another cache", lambda raw: raw[:48] + b"\2" + raw[49:]),
    "forged": ("head is damaged", lambda raw: raw[:64] + b"\7" + raw[65:]),
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
    fill(train, cache, SINGLE, durable=True)
    assert f"{cache.path(1)}: {fault}; it is made again" in capsys.readouterr().err
    assert cache.path(1).read_bytes() == whole
    assert others == {path: path.stat().st_mtime_ns for path in others}


def test_pixels_that_changed_are_found_when_they_are_read(photos: Path, tmp_path: Path) -> None:
    train, cache = filled(photos, tmp_path / "kept")
    raw = bytearray(cache.path(0).read_bytes())
    raw[-1000] ^= 1
    cache.path(0).write_bytes(raw)
    kept = replace(train, cache=replace(cache, each=cache.each))
    with pytest.raises(UserError, match=r"block-000000.pictures: picture 15 of it was damaged") as caught:
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
            (self.folder / f".{self.path(2).name}.12.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        write(self, number, *rest)

    monkeypatch.setattr(Cache, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        fill(train, cache, SINGLE, durable=True)
    made = {number: cache.path(number).stat().st_mtime_ns for number in (0, 1)}
    assert cache.fault(2) == "it is missing"
    monkeypatch.setattr(Cache, "write", write)
    fill(train, cache, SINGLE, durable=True)
    assert made == {number: cache.path(number).stat().st_mtime_ns for number in (0, 1)}
    assert {path.name for path in cache.folder.iterdir()} == {
        "blocks.lock",
        *(f"block-00000{number}.pictures" for number in range(3)),
    }


def test_a_stop_and_a_full_disk_end_a_build_at_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, _ = sets(photos)
    decoded: list[int] = []
    pixels = FolderSet.pixels

    def stopped(self: FolderSet, data: bytes) -> Tensor:
        decoded.append(len(data))
        if len(decoded) == 2:
            raise MemoryError
        time.sleep(0.1 * (len(decoded) > 2))
        return pixels(self, data)

    monkeypatch.setattr(FolderSet, "pixels", stopped)
    monkeypatch.setattr(cache_build, "_FEWEST", 36)  # all in one block,
    monkeypatch.setattr(cache_build, "cores", lambda: 1)  # which would take three seconds
    with pytest.raises(MemoryError):
        fill(train, cache_in(tmp_path, train, key_of(train)), SINGLE, durable=True)
    assert len(decoded) < 36
    monkeypatch.undo()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Cache, "write", full)
    with pytest.raises(UserError, match=r"can't write the cache .*: No space left") as caught:
        fill(train, cache_in(tmp_path, train, key_of(train)), SINGLE, durable=True)
    assert "Free some space" in caught.value.remedy


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, 0)
print("held", flush=True)
sys.stdin.read()
"""


def test_what_another_process_is_at_is_left_to_it_until_it_dies(photos: Path, tmp_path: Path) -> None:
    train, _ = sets(photos)
    cache = cache_in(tmp_path, train, key_of(train))
    cache.folder.mkdir()
    command = [sys.executable, "-c", HOLDER, str(cache.folder / "blocks.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        thread = threading.Thread(target=fill, args=(train, cache, SINGLE, False), daemon=True)
        thread.start()
        until = time.monotonic() + 60
        while cache.fault(1) or cache.fault(2):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert cache.fault(0) == "it is missing"
        holder.kill()
        thread.join(60)
    assert not any(cache.fault(number) for number in range(cache.blocks))


def test_the_key_follows_files_sizes_and_decoder(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, val = sets(photos)
    keys = [key_of(train), key_of(val), key_of(replace(train, decode_size=25)), key_of(train, pixels=False)]
    assert key_of(sets(photos)[0]) == keys[0]
    path = train.path(3)
    stated = path.stat()
    other = bytearray(path.read_bytes())
    other[-9] ^= 1
    path.write_bytes(other)  # of the same size
    os.utime(path, ns=(stated.st_atime_ns, stated.st_mtime_ns + 1))
    keys.append(key_of(sets(photos)[0]))
    monkeypatch.setattr(
        cache_build, "decode_shrunk", lambda *_: torch.zeros(3, 2, 2)
    )  # a decoder that rounds otherwise
    keys.append(key_of(sets(photos)[0]))
    assert len({*keys}) == len(keys)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = sets(photos)
    keys = tuple(map(key_of, both))
    needed = cache_place._needed(tmp_path, both, keys)
    keep(both, str(tmp_path / "whole"), False, SINGLE)
    held = sum(path.stat().st_size for path in tmp_path.glob("whole/*/block*"))
    assert 0.9 * held < needed < 1.1 * held
    assert cache_place._needed(tmp_path / "whole", both, keys) == 0
    assert "MiB of pictures are kept" in capsys.readouterr().err
    free = {"disk": needed // 2, "memory": needed // 2}
    monkeypatch.setattr(cache_place, "_SHARED", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache_place, "_free", lambda at: free["memory" if at == memory() else "disk"])
    for asked_for in ("ram", str(tmp_path / "small")):
        with pytest.raises(UserError, match=r"MiB, and .* has room for") as caught:
            choose(asked_for, both, keys)
        assert caught.value.remedy
    assert choose("auto", both, keys) == ""
    assert keep(both, "auto", False, SINGLE) == both
    free["disk"] = 2 * needed
    assert choose("auto", both, keys) == str(tmp_path / "home/lockstep/pictures")
    free["memory"] = 3 * needed
    assert choose("auto", both, keys) == str(memory())
    assert not [*tmp_path.glob("*/block*")]


def test_memory_is_given_back_by_the_last_who_leaves_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[Path, int]] = []
    monkeypatch.setattr("atexit.register", lambda _, *arguments: held.append(arguments))
    for _ in range(3):
        use(tmp_path / "mine")
    (tmp_path / "mine/block").write_text("pictures")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/users.lock").touch()
    sweep(tmp_path, ())
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}
    for number, arguments in enumerate(held):
        assert (tmp_path / "mine/block").exists(), number
        cache_place._leave(*arguments)
    assert not [*tmp_path.iterdir()]


def trained(root: Path, run: Path, *flags: str) -> str:
    small = ["--image-size", "16", "--decode-size", "24", "--resized-crop", "--model", "digits_net", "--exact", "3"]
    few = ["--epochs", "2", "--batch-size", "8", "--device", "cpu", "--out", str(run), "--checkpoint-every", "0"]
    command = ["train", "folder", "--data-dir", str(root), *small, *few, *flags]
    ended = run_lockstep(*command, cwd=root.parent, env={"XDG_CACHE_HOME": str(root.parent / "home")}, timeout=300)
    assert ended.code == 0, ended.text
    (record,) = (
        line for line in map(json.loads, (run / "journal.jsonl").read_text().splitlines()) if line["kind"] == "run"
    )
    (last,) = (
        line for line in map(json.loads, (run / "journal.jsonl").read_text().splitlines()) if line["kind"] == "end"
    )
    assert any("--skip-broken leaves out 2 of 36" in note for note in record["notes"]) == ("--skip-broken" in flags)
    return str(last["weights_sha256"])


@pytest.mark.slow
def test_weights_are_the_same_with_and_without_a_cache_and_without_broken_files(photos: Path, tmp_path: Path) -> None:
    without = Path(shutil.copytree(photos, tmp_path / "without"))
    for name in BROKEN:
        (without / "train" / name).unlink()
    harm(photos)
    plain = trained(without, tmp_path / "run0", "--nproc", "1", "--workers", "0")
    kept = ("--cache", str(tmp_path / "kept"), "--skip-broken")
    assert trained(photos, tmp_path / "run1", "--nproc", "1", "--workers", "2", *kept) == plain
    assert trained(photos, tmp_path / "run2", "--nproc", "2", "--workers", "1", "--skip-broken") == plain
    assert trained(photos, tmp_path / "run3", "--nproc", "3", "--workers", "0", *kept) == plain


def test_settings_without_sense_are_refused(photos: Path) -> None:
    with pytest.raises(UserError, match="--cache ram keeps pictures as they are shrunk"):
        Config(execution=Execution(cache="ram"))
    for config in (
        Config(data=DataConfig(skip_broken=True)),
        Config(data=DataConfig(dataset="digits", skip_broken=True), execution=Execution(data_dir=str(photos))),
    ):
        with pytest.raises(UserError, match=r"--skip-broken: .* holds no picture files"):
            load_data(config, SINGLE)
