"""--dataset shards:URL of Parquet files: the pictures of tar files, by pages or ranges."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.commands.index import main
from lockstep.data import parquet, remote
from lockstep.data.parquet import pictures, unpacked
from lockstep.data.shard_index import build
from lockstep.data.shards import find_parts
from lockstep.errors import UserError
from tests.data.store import FAULTS, PLAIN, picture, serving, write_parquet, write_parquet_set, write_set
from tests.data.test_shards import always, at_first, refusal, same, sets


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.001)


SNAPPY = {"compression": "snappy"}
PAGES = {"compression": "zstd", "data_page_size": 900, "write_batch_size": 2, "use_dictionary": False}
SOME, LABELS, NAMES = [picture(k % 3, k) for k in range(6)], [0, 1, 2, 0, 1, 2], ["a", "b", "c"]


def read_back(path: Path, label: str = "", image: str = "") -> tuple[list[tuple[bytes, Any]], tuple[str, ...]]:
    """Every picture by its place in the index, each page read alone."""
    data = path.read_bytes()
    rows, names, pages = pictures(str(path), len(data), label, image)
    whole = data
    if len(pages):
        each = [parquet.Page(*page) for page in pages.tolist()]
        whole = b"".join(unpacked(data[p.place : p.place + p.stored], p.size, p.codec) for p in each)
    return [(whole[start : start + size], value) for start, size, _, value in rows], names


@given(
    held=st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.integers(0, 2)), min_size=1, max_size=40),
    again=st.lists(st.integers(0, 5), max_size=20),
    compression=st.sampled_from(["none", "snappy", "gzip", "brotli", "zstd", "lz4"]),
    dictionary=st.booleans(), version=st.sampled_from(["1.0", "2.0"]), group=st.integers(1, 30),
    page=st.sampled_from([1, 200, 1 << 20]), batch=st.integers(1, 9), limit=st.sampled_from([100, 1 << 20]),
)  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_picture_is_where_the_index_says(
    tmp_path: Path, held: list[tuple[bytes, int]], again: list[int], compression: str, dictionary: bool, version: str,
    group: int, page: int, batch: int, limit: int,
) -> None:  # fmt: skip
    held += [held[k % len(held)] for k in again]  # the same picture several times
    path = tmp_path / "x.parquet"
    write_parquet(
        path, [data for data, _ in held], [label for _, label in held], ["a", "b", "c"], compression=compression,
        use_dictionary=dictionary, data_page_version=version, row_group_size=group, data_page_size=page,
        write_batch_size=batch, dictionary_pagesize_limit=limit,
    )  # fmt: skip
    assert read_back(path) == (held, ("a", "b", "c"))


@pytest.mark.parametrize(
    "kinds", [PLAIN, pytest.param(SNAPPY, marks=pytest.mark.slow), PAGES], ids=["plain", "snappy", "pages"]
)
def test_the_pictures_are_those_of_tar_files(tmp_path: Path, kinds: dict[str, Any]) -> None:
    write_set(tmp_path / "tars")
    write_parquet_set(tmp_path / "files/data", **kinds)
    tars, files = sets("tars", tmp_path), sets("files", tmp_path)  # below data/, as on the hub
    for mine, theirs in zip(files, tars, strict=True):
        assert same(mine, theirs)
        assert mine.labels.tolist() == theirs.labels.tolist()
        assert mine.source.shard_sizes.tolist() == theirs.source.shard_sizes.tolist()
        assert (mine.source.digests(np.arange(9)) == theirs.source.digests(np.arange(9))).all()
    train = files[0]
    assert train.classes == ("0", "1", "2")
    assert train.source.where(9) == f"{tmp_path}/files/data/train-00001-of-00005.parquet/row 1"
    assert (len(train.source.index.arrays["pages"]) == 0) == (kinds is PLAIN)
    with serving(tmp_path) as store:
        for window in (0, 2):
            there = sets(f"{store.address}/files/data", tmp_path, shuffle_window=window)
            assert same(there[0], train)
            there[0].source.cache = None
            assert same(there[0], train)
        there[0].source.cache = train.source.cache
        one = there[0]
        for piece in (tmp_path / "cache/lockstep/shards/pieces").glob("??/*"):
            piece.write_bytes(bytes(piece.stat().st_size))
        assert same(one, train)  # what lies on the disk is not trusted
        one.source.cache = None
        for fault in FAULTS[:-1]:
            store.fault = partial(at_first, fault, store, {})
            assert same(one, train), fault
        store.fault = partial(always, "wrong")
        with pytest.raises(UserError, match=r"train-00001-of-00005.parquet: bytes \d+-\d+: .*\(6 tries\)"):
            one.read(np.array([9]))
    # another file of the same size and time
    shard = tmp_path / "files/data/train-00001-of-00005.parquet"
    held = bytearray(shard.read_bytes())
    held[200:5000] = bytes(4800)
    shard.write_bytes(held)
    train.source.cache = None
    with pytest.raises(UserError, match=r"train-00001-of-00005.parquet: bytes \d+-\d+: "):
        train.read(np.arange(8, 17))


def test_columns_and_classes_are_found_or_named(tmp_path: Path) -> None:
    path = tmp_path / "x/train.parquet"
    path.parent.mkdir()

    def table(columns: dict[str, Any], features: dict[str, Any] | None = None) -> None:
        held = json.dumps({"info": {"features": features}})
        made = pyarrow.table(columns).replace_schema_metadata({"huggingface": held} if features else {})
        pyarrow.parquet.write_table(made, path, row_group_size=4)
        for file in (tmp_path / "x").glob(".lockstep*.safetensors"):
            file.unlink()

    def found(name: str = "x") -> tuple[tuple[str, ...], list[int]]:
        (parts, _) = find_parts(f"shards:{name}", tmp_path)
        index = build(parts["train"], 1, lambda done, total: None)
        return index.label_names, index.arrays["labels"].tolist()

    # bytes without a struct, numbers without names, names without a list
    table({"img": SOME, "class": [4, 0, 2, 2, 2, 2]})
    assert "no column is the image among img, class" in refusal("x", tmp_path)
    assert found("x:image=img") == ((), [4, 0, 2, 2, 2, 2])
    names = pyarrow.array(["cat", "ant", "cat", "bee", "bee", "bee"]).dictionary_encode()
    table({"img": SOME, "label": names})
    assert found("x:image=img") == (("ant", "bee", "cat"), [2, 0, 2, 1, 1, 1])
    # two of each: named
    columns = {"front": SOME, "back": SOME[::-1], "fine": [0] * 6, "coarse": [1, 0, 1, 0, 1, 0]}
    of_class = {"names": ["zebra", "ant"], "_type": "ClassLabel"}
    kinds = {"front": {"_type": "Image"}, "back": {"_type": "Image"}, "fine": of_class, "coarse": of_class}
    table(columns, kinds)
    assert "the columns front and back could each be the image among" in refusal("x", tmp_path)
    assert f"shards:{path}:label=COLUMN" in refusal("x:image=back", tmp_path)
    assert "has no column colour" in refusal("x:image=back:label=colour", tmp_path)
    assert found("x:image=back,label=coarse") == (("zebra", "ant"), [1, 0, 1, 0, 1, 0])
    train, val = sets("x:image=back:label=coarse", tmp_path, val_fraction=0.4)
    assert (train.classes, len(train) + len(val)) == (("zebra", "ant"), 6)
    assert train.source.read(0) in SOME
    # the order of the names is that of the files, which agree
    write_parquet(tmp_path / "y/train-0.parquet", SOME, LABELS, ["c", "a", "b"])
    write_parquet(tmp_path / "y/train-1.parquet", SOME, LABELS, ["c", "a", "b"])
    assert found("y")[0] == ("c", "a", "b")
    write_parquet(tmp_path / "z/train-0.parquet", SOME, LABELS, ["c", "a", "b"])
    write_parquet(tmp_path / "z/train-1.parquet", SOME, LABELS, ["a", "b", "c"])
    assert "train-0.parquet has other classes than others have, or in another order" in refusal("z", tmp_path)
    write_set(tmp_path / "y")
    assert "lies among shards of another kind" in refusal("y", tmp_path)


NO_BYTES = "row 4 has no picture's bytes"
in_groups = partial(write_parquet, row_group_size=4)


def with_label(label: int | None, path: Path) -> None:
    in_groups(path, SOME, [*LABELS[:4], label, 2], NAMES)


# what writes a file with something wrong, and what is said of it
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "null": (lambda path: in_groups(path, [*SOME[:4], None, SOME[5]], LABELS, NAMES), NO_BYTES),
    "elsewhere": (
        lambda path: in_groups(path, [*SOME[:4], {"bytes": None, "path": "/etc/passwd"}, SOME[5]], LABELS, NAMES),
        NO_BYTES,
    ),
    "empty": (lambda path: in_groups(path, [*SOME[:4], b"", SOME[5]], LABELS, NAMES), NO_BYTES),
    **{
        str(label): (partial(with_label, label), f"row 4 has the label {label}, and there are 3 classes")
        for label in (-1, 3, None)
    },
    "bare": (lambda path: in_groups(path, SOME, [*LABELS[:4], -1, 2]), "row 4: the label is -1"),
    "text": (lambda path: in_groups(path, SOME, ["a", "b", "a", "b", "", "a"]), "row 4: the label is ''"),
    "real": (lambda path: in_groups(path, SOME, [0.0, 1.0, 1.0, 1.5, 1.0, 1.0]), "or of whole numbers or names"),
    "lists": (lambda path: in_groups(path, SOME, [[0], [1], [1, 2], [0], [0], [0]]), "or of whole numbers or names"),
    "twice": (lambda path: in_groups(path, SOME, LABELS, ["a", "b", "a"]), "a class has no name, or another one's"),
    "names": (lambda path: in_groups(path, SOME, LABELS, 7), "has damaged metadata of the datasets library"),
    "delta": (
        lambda path: in_groups(
            path, SOME, LABELS, NAMES, use_dictionary=False, column_encoding={"image.bytes": "DELTA_BYTE_ARRAY"}
        ),
        "row 0: it is written by encoding 7",
    ),
    "one, many times": (lambda path: write_parquet(path, SOME[:1] * 100_000, [0] * 100_000, NAMES), "100,000 rows in "),
    "zeros": (
        lambda path: in_groups(path, [bytes(80 << 20)], [0], NAMES, compression="zstd", use_dictionary=False),
        "can't be read at row 0: a page of",
    ),
    "label of zeros": (
        lambda path: in_groups(path, SOME[:1], ["a" * (80 << 20)], None, compression="zstd"),
        "can't be read at row 0: a page of",
    ),
    "schema": (
        lambda path: pyarrow.parquet.write_table(pyarrow.table({"a": [1], "label": [2]}), path),
        "no column is the image among a, label",
    ),
    "tar": (lambda path: path.write_bytes(b"x" * 4000), "is no whole Parquet file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_used_is_refused_by_file_and_row(tmp_path: Path, case: str) -> None:
    path, (write, said) = tmp_path / "train.parquet", WRONG[case]
    write(path)
    message = refusal(str(path), tmp_path)
    assert f"{path}" in message
    assert said in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    "kinds", [PLAIN, pytest.param(SNAPPY, marks=pytest.mark.slow), PAGES], ids=["plain", "snappy", "pages"]
)
def test_damaged_files_give_an_error_or_what_was_written(tmp_path: Path, kinds: dict[str, Any]) -> None:
    held, path = [(picture(k % 3, k), k % 3) for k in range(9)], tmp_path / "x.parquet"
    write_parquet(
        path, [data for data, _ in held], [label for _, label in held], list("abc"), row_group_size=5, **kinds
    )
    whole, rng, failed = path.read_bytes(), random.Random(7), 0
    damaged = [whole[:k] for k in (*range(0, len(whole), 97), len(whole) - 1)]
    for _ in range(400):
        data = bytearray(whole)
        at = rng.randrange(len(whole)) if rng.random() < 0.5 else rng.randrange(len(whole) - 2000, len(whole))
        data[at] ^= rng.randrange(1, 256)
        damaged.append(bytes(data))
    for each in damaged:
        path.write_bytes(each)
        said = ""
        try:
            found, _ = read_back(path)
        except UserError as error:
            said, failed = error.message, failed + 1
        assert str(path) in said or len(found) == 9  # in a picture, or in what nobody reads
    assert failed > len(damaged) // 5


def test_memory_is_that_of_a_page(tmp_path: Path) -> None:
    """A row group of 64 MB is indexed and read in pages."""
    path = tmp_path / "train.parquet"
    rng = np.random.default_rng(0)
    write_parquet(
        path, [rng.bytes(1 << 20) for _ in range(64)], [k % 3 for k in range(64)], ["a", "b", "c"],
        compression="snappy", use_dictionary=False, write_batch_size=4,
    )  # fmt: skip
    assert pyarrow.parquet.read_metadata(path).num_row_groups == 1
    program = f"""
import resource
from lockstep.data.parquet import pictures
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
import pyarrow.parquet
before = peak()
rows, names, pages = pictures({str(path)!r}, {path.stat().st_size}, "", "")
print(len(rows), len(pages), peak() - before)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    rows, pages, mib = map(int, ended.stdout.split())
    assert (rows, pages) == (64, 16)
    assert mib < 50


def test_a_machine_without_pyarrow_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet_set(tmp_path / "x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"Parquet files need pyarrow\n  pip install 'lockstep-torch\[parquet\]'"):
        main([str(tmp_path / "x")])
