"""--dataset shards:URL: webdataset's tar files by an index, from the disk and from a server."""

import gzip
import hashlib
import io
import json
import os
import pickle
import random
import signal
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.commands.index import main
from lockstep.config import Config, DataConfig, Execution, ModelConfig, Recovery
from lockstep.data import remote, shard_index
from lockstep.data.contents import duplicates
from lockstep.data.loaders import Samples
from lockstep.data.order import Order, Windows
from lockstep.data.remote import PieceCache, expand_braces
from lockstep.data.shard_index import Index, build, open_index
from lockstep.data.shards import ShardSet, find_parts
from lockstep.data.sources import load, to_evaluate
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.training.control import Agreement, Control
from lockstep.training.loop import train
from tests.data.store import CLASSES, FAULTS, Store, picture, serving, serving_s3, write_folder, write_set, write_shard
from tests.journals import read
from tests.ranks import RankFailed, run_ranks
from tests.subprocesses import Command
from tests.training.test_resume import all_of, end_of

ALONE = World.single()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.001)


def sets(name: str, root: Path, **data: Any) -> tuple[ShardSet, ShardSet]:
    train, val = load(DataConfig(dataset=f"shards:{name}", image_size=8, **data), root, 0, ALONE)
    assert isinstance(train, ShardSet)
    assert isinstance(val, ShardSet)
    return train, val


def keys(images: ShardSet) -> list[tuple[str, int]]:
    return [(images.source.key(k), label) for k, label in enumerate(images.labels.tolist())]


def refusal(name: str, root: Path, **data: Any) -> str:
    with pytest.raises(UserError) as error:
        sets(name, root, **data)
    return str(error.value)


def same(one: ShardSet, other: ShardSet) -> bool:
    ids = np.arange(len(one))
    return all(bool((a == b).all()) for a, b in zip(one.read(ids), other.read(ids), strict=True))


def test_what_webdataset_writes_is_read_as_webdataset_reads_it(tmp_path: Path) -> None:
    root = write_set(tmp_path / "photos")
    train, val = sets("photos", tmp_path)
    program = f"""
import hashlib, json, webdataset
shards = [f"{root}/train-{{k:06}}.tar" for k in range(5)]
for each in webdataset.WebDataset(shards, shardshuffle=False, empty_check=False):
    digest = hashlib.sha256(each.get("jpg") or each["png"]).hexdigest()
    print(json.dumps([each["__key__"], int(each["cls"]), digest]))
"""  # in a process of its own: it leaves files open
    ended = Command(sys.executable, "-c", program, warm=True).end()
    assert ended.code == 0, ended.text
    theirs = [json.loads(line) for line in ended.out.splitlines()]
    read = [hashlib.sha256(train.source.read(k)).hexdigest() for k in range(len(train))]
    mine = [[key.partition("/")[2], label, digest] for (key, label), digest in zip(keys(train), read, strict=True)]
    assert mine == theirs
    assert (train.classes, len(val), train.source.shard_sizes.tolist()) == (("0", "1", "2"), 9, [8, 9, 10, 8, 9])
    assert train.source.where(9) == f"{root}/train-000001.tar/n001/00009"
    assert train.source.digests(np.array([4]))[0].tobytes().hex() == read[4][:32]
    # the same set, however it is named, and wherever it lies
    (tmp_path / "elsewhere/train").mkdir(parents=True)
    (tmp_path / "elsewhere/val").mkdir()
    for file in root.glob("*.tar"):
        (tmp_path / "elsewhere" / file.name.partition("-")[0] / file.name).write_bytes(file.read_bytes())
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/data").symlink_to(root)
    for name in (
        str(root), f"file://{root}", "elsewhere", "hub",
        f"{root}/train-{{000000..000004}}.tar:val={root}/val-000000.tar",
        f"{root}/train-*.tar:val=photos/val-{{000000,}}.tar".replace("{000000,}", "000000"),
    ):  # fmt: skip
        again = sets(name, tmp_path)
        assert [each.fingerprint for each in again] == [train.fingerprint, val.fingerprint], name
        assert same(again[0], train)
    # workers get a few words, and labels from the map
    sent = pickle.dumps(Samples(train))
    assert len(sent) < 4000
    assert same(pickle.loads(sent).images, train)
    said = duplicates(train, val, "auto", ALONE)
    assert not any(line.startswith("note: 9 of 9 images to validate on") for line in said)


def test_labels_may_be_names_in_json_and_classes_a_file(tmp_path: Path) -> None:
    write_set(tmp_path / "names", ending="json")
    train, val = sets("names", tmp_path)
    assert (train.classes, train.labels[:4].tolist(), val.labels[:4].tolist()) == (CLASSES, [0, 1, 2, 0], [0, 1, 2, 0])
    write_set(tmp_path / "numbers")
    (tmp_path / "numbers/classes.txt").write_text("wasp\nfly\nfrog\nunseen\n")
    named = sets("numbers:classes=classes.txt", tmp_path)
    assert [each.classes for each in named] == [("wasp", "fly", "frog", "unseen")] * 2
    assert named[0].notes == ("note: no picture of 1 class(es): unseen",)
    write_shard(tmp_path / "gaps/0.tar", [0, 9, 5] * 4)
    gaps, _ = sets("gaps", tmp_path)
    assert len(gaps.classes) == 10
    assert gaps.notes[0] == "note: no picture of 7 class(es): 1, 2, 3, 4, 6, ..."
    (tmp_path / "order.txt").write_text("cat\nbee\nant\n")
    other = sets(f"names:classes={tmp_path}/order.txt", tmp_path)
    assert [each.labels[:3].tolist() for each in other] == [[2, 1, 0]] * 2
    (tmp_path / "order.txt").write_text("cat\nbee\n")
    assert "has classes that are not among those to train on: ant" in refusal(
        f"names:classes={tmp_path}/order.txt", tmp_path
    )
    assert "has 2 classes, and a label is 2" in refusal(f"numbers:classes={tmp_path}/order.txt", tmp_path)
    assert "unknown option of shards: 'clases'" in refusal("nowhere:clases=order.txt", tmp_path)  # before it looks
    # a field of another name
    shard = tmp_path / "fields/train-0.tar"
    shard.parent.mkdir()
    with webdataset.TarWriter(str(shard), encoder=False) as out:
        for k in range(6):
            held = {"label": 7, "kind": {"a": CLASSES[k % 2]}["a"]}
            out.write({"__key__": f"{k}", "jpg": picture(k % 2, k), "json": json.dumps(held).encode()})
    train, _ = sets("fields:label=kind", tmp_path, val_fraction=0.4)
    assert train.classes == ("ant", "bee")
    for name in ("fields:label=colour", "unnamed"):
        write_shard(tmp_path / "unnamed/0.tar", ["ant"] * 4, ending="json")
        shard = tmp_path / "unnamed/0.tar"
        shard.write_bytes(shard.read_bytes().replace(b'"label"', b'"breed"'))
        first, remedy = refusal(name, tmp_path).splitlines()
        field = "label" if ":" in name else "breed"
        assert first.endswith("has no label"), name
        assert f"KEY.json, as :label={field}; it has {field}" in remedy, name


def test_a_part_is_held_out_by_what_pictures_hold(tmp_path: Path) -> None:
    write_set(tmp_path / "all")
    (tmp_path / "all/val-000000.tar").unlink()
    train, val = sets("all", tmp_path, val_fraction=0.3)
    assert len(train) + len(val) == 44
    assert not {key for key, _ in keys(train)} & {key for key, _ in keys(val)}
    assert train.source.shard_sizes.sum() == len(train)
    # the same pictures in other shards: the same ones are held out
    for k in range(2):
        write_shard(tmp_path / f"again/{k}.tar", [n % 3 for n in range(22 * k, 22 * k + 22)], 22 * k)
    _, other = sets("again", tmp_path, val_fraction=0.3)
    assert {key.rpartition("/")[2] for key, _ in keys(other)} == {key.rpartition("/")[2] for key, _ in keys(val)}
    assert same(val, pickle.loads(pickle.dumps(val)))
    assert "val-fraction" in refusal(str(write_set(tmp_path / "both")), tmp_path, val_fraction=0.3)


def test_a_lone_part_that_is_not_to_train_on_is_evaluated_and_not_trained_on(tmp_path: Path) -> None:
    for split in ("val", "test"):
        write_shard(tmp_path / split / f"set-{split}-0.tar", [0, 1, 2] * 4)
        said = refusal(split, tmp_path)
        assert f"shards:{split} has no part to train on: all of it is {split}\n" in said
        assert "by a pattern" in said
        assert sum(map(len, sets(f"{split}/*.tar", tmp_path))) == 12
        assert len(to_evaluate(f"shards:{split}", str(tmp_path), 8, False, ALONE)) == 12


def test_shards_of_one_split_are_called_alike(tmp_path: Path) -> None:
    for name in ("train-0.tar", "val-0.tar", "dev-0.tar", "val-1.tar"):
        write_shard(tmp_path / "x" / name, [0, 1, 2])
        write_shard(tmp_path / "y" / name.replace("-", "/"), [0, 1, 2])
    for folder in ("x", "y"):
        said = refusal(folder, tmp_path)
        assert f"{folder} has shards called dev as well as val\n  Keep those of one name for val" in said
    (tmp_path / "x/dev-0.tar").rename(tmp_path / "x/dev-0.txt")
    assert list(map(len, sets("x", tmp_path))) == [3, 6]


def test_a_shard_that_changed_is_refused_by_name_and_indexed_again(tmp_path: Path) -> None:
    root = write_set(tmp_path / "photos")
    train, _ = sets("photos", tmp_path)
    first = train.fingerprint
    shard = root / "train-000003.tar"
    before = shard.stat()
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert f"{shard} has changed since it was indexed: it was written again" in refusal("photos", tmp_path)
    write_shard(shard, [0, 1, 2], 500)
    assert "run `lockstep index` again" in refusal("photos", tmp_path)
    read_again: list[int] = []
    (parts, _) = find_parts("shards:photos", tmp_path)
    build(parts["train"], 2, lambda done, total: read_again.append(done))
    assert read_again == [5]  # the others are taken from the index that was there
    train, _ = sets("photos", tmp_path)
    assert (train.source.shard_sizes.tolist(), train.fingerprint != first) == ([8, 9, 10, 3, 9], True)
    assert [key for key, _ in keys(train)][27:31] == [
        *(f"train-000003.tar/n071/{k:05}" for k in (500, 501, 502)), "train-000004.tar/n005/00035",
    ]  # fmt: skip
    # written over while it is read: other bytes are an error, which names why
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match=r"train-000003.tar: bytes .*other bytes came for n071/00501 than were indexed"):
        train.read(np.array([28]))
    shard.unlink()
    assert f"there is no shard {shard}" in refusal("photos/train-{000000..000004}.tar", tmp_path)
    # a damaged index is none: it is built again
    (file,) = [each for each in root.glob(".lockstep-*") if len(Index(each)) == 9]
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    assert open_index(parts["val"]) is not None
    file.write_bytes(data[:-8])
    assert open_index(parts["val"]) is None


def test_an_index_of_another_version_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_set(tmp_path / "photos")
    with monkeypatch.context() as before:
        before.setattr(shard_index, "_VERSION", "lockstep shards 2")
        first, _ = sets("photos", tmp_path)
    (parts, _) = find_parts("shards:photos", tmp_path)
    assert all(open_index(part) is None for part in parts.values())
    files = {*root.glob(".lockstep-*")}
    train, _ = sets("photos", tmp_path)
    assert train.fingerprint == first.fingerprint
    assert {*root.glob(".lockstep-*")} == files  # in its place
    assert all(open_index(part) is not None for part in parts.values())


def test_an_index_that_was_killed_goes_on_with_the_shards_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_set(tmp_path / "photos", shards=6)
    program = f"""
import os, signal
from pathlib import Path
from lockstep.data.shard_index import build
from lockstep.data.shards import find_parts
parts, _ = find_parts("shards:{root}", Path("."))
build(parts["train"], 1, lambda done, total: done < 3 or os.kill(os.getpid(), signal.SIGKILL))
"""
    assert Command(sys.executable, "-c", program, warm=True).end().code == -signal.SIGKILL
    assert not list(root.glob(".lockstep-*.safetensors"))
    write_shard(root / "train-000001.tar", [2, 1], 800)  # of those that were done, one changes
    opened: list[str] = []
    samples = shard_index._samples

    def counted(url: str, size: int, field: str) -> Any:
        opened.append(url.rpartition("/")[2])
        return samples(url, size, field)

    monkeypatch.setattr(shard_index, "_samples", counted)
    assert main([str(root)]) == 0
    said = capsys.readouterr().out
    assert "train: 47 samples in 6 shard(s)" in said
    assert "val: 9 samples in 1 shard(s)" in said
    done = {"train-000000.tar", "train-000002.tar"}
    assert {"train-000001.tar", "val-000000.tar"} <= set(opened)
    assert not done & set(opened)
    assert not list(root.glob(".lockstep-*.parts"))
    fresh, _ = find_parts(f"shards:{root}/train-*.tar", tmp_path)
    once = build(fresh["train"], 1, lambda done, total: None)
    (parts, _) = find_parts(f"shards:{root}", tmp_path)
    index = open_index(parts["train"])
    assert index is not None
    assert index.content == once.content
    opened.clear()
    assert main([str(root)]) == 0
    assert not opened
    # a folder that nobody may write into: the index is in the user's own
    for file in root.glob(".lockstep-*"):
        file.unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != root)
    train, _ = sets(str(root), tmp_path)
    assert train.source.index.path.is_relative_to(tmp_path / "cache")
    assert not list(root.glob(".lockstep-*"))


BROKEN: dict[str, tuple[Callable[[list[tuple[str, bytes]]], Any], str]] = {
    "two": (lambda m: m.insert(0, ("00000.png", picture(0, 0, "PNG"))), "00000 has two pictures, .png and .jpg"),
    "none": (lambda m: m.pop(0), "00000 has no picture"),
    "unlabelled": (lambda m: m.pop(1), "00000 has no label"),
    "apart": (lambda m: m.append(m.pop(0)), "has no picture"),
    "twice": (lambda m: m.append(("00000.txt", b"")), "the members of 00000 do not lie side by side"),
    "empty": (lambda m: m.__setitem__(0, ("00000.jpg", b"")), "the picture of 00000 is empty"),
    "minus": (lambda m: m.__setitem__(1, ("00000.cls", b"-1")), "00000.cls: the label is -1\n"),
    "large": (lambda m: m.__setitem__(1, ("00000.cls", b"99999999999")), "00000.cls: the label is 99999999999\n"),
    "endless": (lambda m: m.__setitem__(1, ("00000.cls", b"9" * 5000)), "00000.cls is no text or JSON object"),
    "mixed": (
        lambda m: m.__setitem__(1, ("00000.cls", b"bee")),
        "are names, and some are numbers, as of 00000 and 0000",
    ),
    "list": (lambda m: m.__setitem__(1, ("00000.json", b"[1]")), "is no text or JSON object"),
    "real": (lambda m: m.__setitem__(1, ("00000.json", b'{"label": 1.5}')), "the label is 1.5"),
}


def tar(members: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def test_what_is_no_whole_shard_is_refused_by_name(tmp_path: Path) -> None:
    def members() -> list[tuple[str, bytes]]:
        return [each for k in range(3) for each in ((f"{k:05}.jpg", picture(k, k)), (f"{k:05}.cls", b"%d" % k))]

    (tmp_path / "x").mkdir()
    shard = tmp_path / "x/0.tar"
    for case, (change, what) in BROKEN.items():
        held = members()
        change(held)
        shard.write_bytes(tar(held))
        message = refusal("x", tmp_path, val_fraction=0.4)
        assert what in message, case
        assert str(shard) in message, case
    write_shard(tmp_path / "two/0.tar", [0, 1])
    write_shard(tmp_path / "two/1.tar", ["ant", "bee"], 2)
    assert "some are numbers, as of 1.tar/n000/00002 and 0.tar/n000/00000" in refusal("two", tmp_path)
    whole = tar(members())
    end = 6 * 512 + sum(-(-len(data) // 512) * 512 for _, data in members())
    for size in (0, 100, 512, 700, end - 512, end - 1, end, end + 100):
        shard.write_bytes(whole[:size])
        message = refusal("x", tmp_path, val_fraction=0.4)
        assert str(shard) in message, size
        assert "tar" in message, size
    second = 512 + -(-len(members()[0][1]) // 512) * 512
    shard.write_bytes(whole[:second] + b"\x01" + whole[second + 1 :])
    assert "no member and no end of a tar file" in refusal("x", tmp_path, val_fraction=0.4)
    shard.write_bytes(gzip.compress(whole))
    assert "Is it compressed" in refusal("x", tmp_path, val_fraction=0.4)
    # what is beside samples is nothing
    more = [("__meta__.json", b"{}"), ("._00000.jpg", b"x"), ("README", b"x"), ("00003.seg.png", b"x")]
    shard.write_bytes(tar([*more, *members()]))
    (parts, _) = find_parts("shards:x", tmp_path)
    assert "00003 has no picture" in refusal("x", tmp_path)
    shard.write_bytes(tar([*more[:3], *members()]))
    assert len(build(parts["train"], 1, lambda done, total: None)) == 3
    for name, what in {
        "nothing": "there are no shards at", "x:colour=1": "colour", "": "names nothing",
        "http://me:secret@localhost/x.tar": "holds a user, a password, a token, a query",
        "http://localhost/x.tar?token=secret": "holds a user, a password, a token, a query",
        "x/{0..1}.tar": "there is no shard",
    }.items():  # fmt: skip
        message = refusal(name, tmp_path)
        assert what in message, name
        assert "secret" not in message


def test_a_damaged_shard_gives_an_error_or_the_samples_that_were_written(tmp_path: Path) -> None:
    path, rng, failed = tmp_path / "x.tar", random.Random(7), 0
    write_shard(path, [k % 3 for k in range(9)])
    whole = path.read_bytes()
    damaged = [whole[:k] for k in range(0, len(whole), 97)]
    for _ in range(400):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] ^= rng.randrange(1, 256)
        damaged.append(bytes(changed))
    for data in damaged:
        path.write_bytes(data)
        said, found = "", 0
        try:
            found = len([*shard_index._samples(str(path), len(data), "")])
        except UserError as error:
            said, failed = error.message, failed + 1
        assert str(path) in said or found == 9  # in a picture, a label, or what nobody reads
    assert failed > len(damaged) // 5


def test_memory_is_that_of_a_picture(tmp_path: Path) -> None:
    """A shard of 64 MB is indexed picture by picture."""
    data = np.random.default_rng(0).bytes(1 << 20)
    (tmp_path / "x.tar").write_bytes(
        tar([each for k in range(64) for each in ((f"{k:05}.jpg", data), (f"{k:05}.cls", b"%d" % (k % 3)))])
    )
    program = f"""
import resource
from pathlib import Path
from lockstep.data.shard_index import build
from lockstep.data.shards import find_parts
parts, _ = find_parts("shards:{tmp_path}/x.tar", Path("."))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
print(len(build(parts["train"], 1, lambda done, total: None)), peak() - before)
"""
    ended = Command(sys.executable, "-c", program).end()
    assert ended.code == 0, ended.text
    samples, mib = map(int, ended.out.split())
    assert samples == 64
    assert mib < 50


def test_parquet_files_are_refused_with_the_way_to_read_them(tmp_path: Path) -> None:
    for name in ("files/train-0.parquet", "hub/data/validation-0.parquet", "parts/train/0.parquet", "parts/README"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "files/1.parquet").write_bytes(b"PAR1")
    with serving(tmp_path) as store:
        for name in (
            *("files", "hub", "parts", "files/train-0.parquet", "files/{0..3}.parquet", "files/*"),
            *(f"{store.address}/{each}" for each in ("files", "hub/", "parts", "files/train-*.parquet", "files/t*")),
            *("s3://bucket/train-*.parquet", f"{write_set(tmp_path / 'tars')}/train-*.tar:val=files"),
        ):
            message = refusal(name, tmp_path)
            assert ".parquet is a Parquet file, and shards: reads tar files\n" in message, name
            assert message.endswith("--dataset hf:FOLDER reads Parquet files, from a folder of this machine."), name
            assert len(message.splitlines()) == 2, name
    assert "--dataset hf:FOLDER" in refusal("files:image=x", tmp_path)  # one of hf:'s options
    with pytest.raises(UserError, match="--dataset hf:FOLDER"):
        main([str(tmp_path / "files")])
    # a table beside tar files is no shard
    (tmp_path / "tars/train-000000.parquet").write_bytes(b"PAR1")
    assert sets("tars", tmp_path)[0].source.shard_sizes.tolist() == [8, 9, 10, 8, 9]


def test_a_compressed_shard_is_refused_by_name_and_not_passed_over(tmp_path: Path) -> None:
    for folder, names in {
        "some": ("0.tar", "1.tar", "2.tar.gz"), "all": ("0.TGZ",), "parts": ("train/0.tar", "val/0.tar.bz2"),
        "hub/data": ("0.tar", "1.tar.xz"), "new": ("0.tar.zst",),
    }.items():  # fmt: skip
        for name in names:
            write_shard(tmp_path / folder / name, [0, 1, 2])
    for name, file in {
        "some": "some/2.tar.gz", "some/2.tar.gz": "some/2.tar.gz", "some/{0..2}.tar.gz": "some/{0..2}.tar.gz",
        "all": "all/0.TGZ", "parts": "parts/val/0.tar.bz2", "hub": "hub/data/1.tar.xz", "new": "new/0.tar.zst",
        "parts/train:val=parts/val": "parts/val/0.tar.bz2",
    }.items():  # fmt: skip
        assert f"{file} is a compressed tar file" in refusal(name, tmp_path), name
    write_shard(tmp_path / "upper/a.TAR", [0, 0, 0])
    write_shard(tmp_path / "upper/b.tar", [0, 0, 0], 3)
    assert sum(map(len, sets("upper", tmp_path))) == 6
    assert sum(map(len, sets("upper/a.TAR", tmp_path))) == 3


def test_patterns() -> None:
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]


# ---- the order


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    width=st.integers(1, 14), seed=st.integers(0, 99), epoch=st.integers(0, 5),
    fraction=st.sampled_from([1.0, 0.5, 0.03]), batch=st.integers(1, 9), repeats=st.sampled_from([1, 2]),
)  # fmt: skip
@settings(max_examples=60)
def test_windows_are_a_permutation_whose_middle_is_as_near_as_its_start(
    sizes: list[int], width: int, seed: int, epoch: int, fraction: float, batch: int, repeats: int
) -> None:
    n = sum(sizes)
    windows = Windows(np.array(sizes), width, seed, fraction)
    order = Order(n, batch, seed, fraction, windows=windows)
    walked = np.concatenate([*order.steps(epoch)])
    assert len(set(walked.tolist())) == len(walked) == order.used == windows.used.sum()
    assert 0 <= walked.min() <= walked.max() < n
    # a step that is asked for alone, by another process, is the same
    for t in {0, order.steps_per_epoch // 2, order.steps_per_epoch - 1}:
        fresh = Order(n, batch, seed, fraction, windows=Windows(np.array(sizes), width, seed, fraction))
        assert fresh.step(epoch, t).tolist() == walked[t * batch : (t + 1) * batch].tolist()
    # one window after the other, and every epoch uses the same samples
    shard = np.searchsorted(np.cumsum(sizes), walked, side="right")
    place = np.argsort(windows.shards(epoch))[shard] // width
    assert (np.diff(place) >= 0).all()
    again = np.concatenate([*order.steps(epoch + 1)])
    assert sorted(again.tolist()) == sorted(walked.tolist())
    if repeats > 1 and batch % repeats == 0:
        several = np.concatenate([*Order(n, batch, seed, fraction, False, repeats, windows=windows).steps(epoch)])
        assert set((several % n).tolist()) <= set(walked.tolist())


def test_a_window_mixes_its_shards_and_epochs_differ() -> None:
    windows = Windows(np.full(20, 50), 5, 3)
    one, two = (windows.shuffled(epoch, np.arange(1000)) for epoch in (0, 1))
    assert (one != two).mean() > 0.9
    for first in range(0, 1000, 250):
        assert len(set((one[first : first + 60] // 50).tolist())) == 5
        assert abs(np.corrcoef(np.arange(250), one[first : first + 250] % 50)[0, 1]) < 0.2


# ---- a server


def at_first(fault: str, store: Store, seen: dict[tuple[str, str], int], path: str, number: int) -> str:
    """Of every third range, twice (of the first alone where the server is late): every third request at large would now
    and then be one's all six.

    Once would be too few: the HTTP library may try again by itself where a connection is closed.
    """
    asked = store.gets[number - 1]
    if asked in seen or (not seen if fault == "late" else len(store.gets) % 3 == 0):
        seen[asked] = seen.get(asked, 0) + 1
    return fault if 0 < seen.get(asked, 0) < 3 else ""


def always(fault: str, path: str, number: int) -> str:
    return fault


def test_a_server_with_faults_gives_the_same_pictures_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "_DEADLINE_S", 1.0)
    root = write_set(tmp_path / "photos")
    here, _ = sets("photos", tmp_path)
    with serving(tmp_path) as store:
        train, _ = sets(f"{store.address}/photos", tmp_path, shuffle_window=2)
        assert train.fingerprint == here.fingerprint
        asked = len(store.gets)
        assert same(train, here)
        assert len(store.gets) == asked + 5  # in pieces, which are whole shards here
        assert same(pickle.loads(pickle.dumps(train)), here)
        assert len(store.gets) == asked + 5  # and are kept
        # what lies on the disk is not trusted either
        for piece in (tmp_path / "cache/lockstep/shards/pieces").glob("??/*"):
            if len(piece.name) == 64:
                piece.write_bytes(bytes(piece.stat().st_size))
        assert same(train, here)
        assert len(store.gets) == asked + 10
        one, _ = sets(
            f"{store.address}/photos/train-{{000000..000004}}.tar:val={store.address}/photos/val-000000.tar", tmp_path
        )
        assert (one.fingerprint, one.source.piece) == (here.fingerprint, 0)
        asked = len(store.gets)
        for _ in range(2):
            assert same(one, here)
            assert len(store.gets) == asked + len(here)  # each picture alone, and kept too
        one.source.cache = None
        capfd.readouterr()
        for fault in FAULTS:
            store.fault = partial(at_first, fault, store, {})
            assert same(one, here), fault
            (line, *_) = [line for line in capfd.readouterr().err.splitlines() if "try 2 of" in line]
            assert f"note: {store.address}/photos/train-00000" in line, fault
            assert ".tar: bytes " in line, fault
        for fault in ("503", "wrong", "cut"):
            store.fault = partial(always, fault)
            with pytest.raises(UserError, match=r"train-000001.tar: bytes \d+-\d+: .*\(6 tries\)"):
                one.read(np.array([9]))
        store.fault = lambda path, number: ""
        # another object of the same size
        shard = root / "train-000001.tar"
        data = bytearray(shard.read_bytes())
        data[int(one.source.index.arrays["starts"][9]) + 40] ^= 1
        shard.write_bytes(data)
        with pytest.raises(UserError, match=r"other bytes came for n001/00009 than were indexed"):
            one.read(np.array([9]))
        assert f"{store.address}/photos/train-000001.tar has changed" in refusal(f"{store.address}/photos", tmp_path)
        shard.unlink()
        assert "Is the address right" in refusal(f"{store.address}/photos/train-{{000000..000004}}.tar", tmp_path)
    assert "abc:// can't be reached" in refusal("abc://x/y.tar", tmp_path)


def test_the_cache_keeps_to_its_limit_and_survives_a_kill(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path / "pieces", 1 << 20)
    fetched: list[int] = []

    def piece(k: int) -> bytes:
        fetched.append(k)
        return bytes([k]) * (128 << 10)

    for k in range(40):
        assert cache.read(f"{k:064x}", 5, 3, partial(piece, k)) == bytes([k]) * 3
    assert cache.read(f"{39:064x}", 0, 1, lambda: piece(39)) == bytes([39])
    assert fetched == [*range(40)]
    assert sum(path.stat().st_size for path in cache.folder.glob("??/*")) <= 1 << 20
    # one that is killed while it writes leaves no piece, and no lock
    program = f"""
import os, signal
from pathlib import Path
from lockstep.commands.index import main
from lockstep.data import remote, shard_index
def killed(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
Path.replace = killed
remote.PieceCache(Path({str(cache.folder)!r}), 1 << 20).read("{77:064x}", 0, 1, lambda: b"abc")
"""
    assert Command(sys.executable, "-c", program, warm=True).end().code == -signal.SIGKILL
    assert cache.read(f"{77:064x}", 0, 3, lambda: b"xyz") == b"xyz"


def of_s3(world: World, root: str) -> None:
    """A bucket has what lies here, however it is named; what is another object or not there is refused by name."""
    import boto3

    here, _ = sets(root, Path(root))
    for name in ("s3://photos/deep", "s3://photos/deep/train-*.tar:val=s3://photos/deep/val-000000.tar"):
        for window in (0, 2):
            train, _ = sets(name, Path(root), shuffle_window=window)
            assert train.fingerprint == here.fingerprint
            assert same(train, here)
    boto3.client("s3").put_object(Bucket="photos", Key="deep/train-000002.tar", Body=b"x" * 100)
    for name, said in (
        ("s3://photos/deep", "train-000002.tar has changed since it was indexed: it has 100 bytes"),
        ("s3://photos/none", "there are no shards at"),
        ("s3://nobody/x.tar", "s3://nobody/x.tar"),
    ):
        assert said in refusal(name, Path(root))


@pytest.mark.integration
def test_a_real_s3_server(tmp_path: Path) -> None:
    root = write_set(tmp_path / "served/deep")
    with serving_s3(tmp_path / "served") as environ:
        run_ranks(of_s3, 1, str(root), timeout=240, env={**environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert not any(b"hidden" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


# ---- the law


def config_of(name: str, workers: int, window: int, data_dir: str = "") -> Config:
    execution = Execution(workers=workers, device="cpu", threads=1, law="off", log_every=1, data_dir=data_dir)
    data = DataConfig(dataset=name, image_size=16, resized_crop=True, flip=True, shuffle_window=window)
    recovery = Recovery(checkpoint_every="2steps")
    return Config(
        epochs=2, batch_size=9, exact=3, data=data, model=ModelConfig(model="mlp"), execution=execution,
        recovery=recovery,
    )  # fmt: skip


class Cell(NamedTuple):
    kind: str  # tar, folder
    place: str
    window: int
    ranks: int
    workers: int
    stop: int = 0  # after so many steps, and
    kill: bool = False  # by SIGKILL
    then: int = 0  # ranks that go on

    @property
    def name(self) -> str:
        end = f"{'killed' if self.kill else 'stopped'}, then N={self.then}" if self.stop else "whole"
        return f"{self.kind} {self.place} window={self.window} N={self.ranks} workers={self.workers} {end}"


FEW = [
    Cell("tar", "here", 2, 1, 0), Cell("tar", "http", 2, 2, 2), Cell("tar", "http", 2, 3, 0, 3, False, 1),
    Cell("tar", "here", 2, 2, 0), Cell("folder", "here", 0, 1, 0), Cell("tar", "http", 0, 2, 2),
]  # fmt: skip
OTHERS = [
    Cell("folder", "here", 0, 2, 2), Cell("tar", "http", 0, 2, 0, 2, False, 2), Cell("tar", "here", 0, 3, 2),
    Cell("tar", "http", 2, 2, 2, 4, True, 1),
]  # fmt: skip
TABLE = [
    Cell("tar", place, 2, n, workers, (n + 3) * killed, killed, n % 3 + 1 if killed else 0)
    for place in ("here", "http", "s3") for n in (1, 2, 3) for workers in (0, 2, 4) for killed in (False, True)
]  # fmt: skip
# six cells of the table, others for each seed, half of them with a kill: all of it takes many minutes
PART = [*OTHERS, *TABLE[int(os.environ.get("LOCKSTEP_FUZZ_SEED", "0")) % 9 :: 9]]


def killed(world: World, config: Config, folder: str, steps: int) -> None:
    """`train`; the ranks are killed after so many steps, and when there is a checkpoint."""
    agree, kept = Control.agree, Path(folder, "checkpoints")

    def dying(self: Control, taken: int, failed: bool = False, now: bool = False) -> Agreement:
        if taken == steps:
            deadline = time.monotonic() + 60
            while not [*kept.glob("step-*")] and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(self, taken, failed, now)

    Control.agree = dying  # type: ignore[method-assign,assignment]
    train(config, world, Path(folder))


@pytest.mark.parametrize("cells", [FEW, pytest.param(PART, marks=pytest.mark.slow(45))], ids=["few", "table"])
def test_one_ledger_and_one_set_of_weights_on_any_ranks_workers_and_store(tmp_path: Path, cells: list[Cell]) -> None:
    root = tmp_path / "served"
    write_set(root / "tar", by_class=True)
    write_folder(tmp_path / "folder")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "LOCKSTEP_READ_TIMEOUT": "5"}
    with ExitStack() as stack:
        store = stack.enter_context(serving(root))
        for part in find_parts(f"shards:{store.address}/tar", tmp_path)[0].values():
            build(part, 2, lambda done, total: None)  # before the faults: no digest is known then
        store.fault = lambda path, number: FAULTS[number // 9 % 6] if number % 9 == 0 else ""
        places = {"here": str(root), "http": store.address, "s3": "s3://photos"}
        if any(cell.place == "s3" for cell in cells):
            environ |= stack.enter_context(serving_s3(root))
        before: dict[int, list[tuple[Any, ...]]] = {1: [], 2: [], 3: []}
        after: dict[int, list[tuple[Any, ...]]] = {1: [], 2: [], 3: []}
        for cell in cells:
            name = "folder" if cell.kind == "folder" else f"shards:{places[cell.place]}/{cell.kind}"
            job = config_of(name, cell.workers, cell.window, str(tmp_path / "folder")), str(tmp_path / cell.name)
            if cell.kill:
                with pytest.raises(RankFailed):
                    run_ranks(killed, cell.ranks, *job, cell.stop, timeout=120, env=environ)
            elif cell.stop:
                before[cell.ranks].append((*job, cell.stop))
            after[cell.then or cell.ranks].append(job)
        for jobs in (before, after):
            for n, mine in filter(lambda each: each[1], jobs.items()):
                run_ranks(all_of, n, mine, timeout=120 + 30 * len(mine), env=environ)
    found: dict[int, dict[tuple[str, str], list[str]]] = {0: {}, 2: {}}
    for cell in cells:
        end = end_of(tmp_path / cell.name)
        assert (end["status"], end["steps"]) == ("completed", 10), cell.name
        print(f"{end['ledger_sha256'][:12]} {end['weights_sha256'][:12]} {cell.name}")
        found[cell.window].setdefault((end["ledger_sha256"], end["weights_sha256"]), []).append(cell.name)
        if cell.kill:
            records = read(tmp_path / cell.name / "journal.jsonl")
            (_, again) = [k for k, record in enumerate(records) if record["kind"] == "run"]
            assert next(record["step"] for record in records[again:] if record["kind"] == "step") > 1, cell.name
    assert [len(each) for each in found.values()] == [1, 1], found
    assert found[0].keys() != found[2].keys()
