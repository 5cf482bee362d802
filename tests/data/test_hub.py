"""--dataset hf:NAME: sets of the datasets library, from local folders."""

import importlib.util
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.cache import keep, key_of
from lockstep.data.contents import duplicates
from lockstep.distributed.world import World
from lockstep.errors import UserError
from tests.data.formats import Pair, folder_sets, picture_sets
from tests.ranks import run_ranks

ALONE = World.single()
NAMES = ["bee", "ant"]
datasets: Any = None  # imported in a process of its own: it and pyarrow start threads, which a fork would lose


def test_all_of_it_in_one_process(tmp_path: Path) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    environ = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    checks = [check.__name__ for check in _checks()]
    assert run_ranks(_all, 1, str(tmp_path), timeout=240, env=environ) == [checks]


def _checks() -> tuple[Callable[[Path], None], ...]:
    return (
        a_saved_set_reads_as_its_pictures_in_a_folder,
        what_is_written_anew_is_no_longer_the_set_that_was_kept,
        parquet_files_and_class_folders_are_sets_too,
        columns_and_classes_are_found_by_type_or_named,
        classes_of_the_parts_are_matched_by_name,
        a_row_without_a_picture_is_named_or_left_out,
        what_can_not_be_used_says_why,
    )


def _all(world: World, root: str) -> list[str]:
    """The names of the checks that held."""
    global datasets
    import datasets

    datasets.disable_progress_bars()
    held = []
    for check in _checks():
        (Path(root) / check.__name__).mkdir()
        check(Path(root) / check.__name__)
        held.append(check.__name__)
    return held


def load(name: str, root: Path, **data: Any) -> Pair:
    return picture_sets(f"hf:{name}", root, image_size=16, **data)


def encoded(number: int, seed: int = 0) -> bytes:
    """In a format that every version of its encoder writes alike: the division goes by these bytes."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(number + seed).integers(0, 256, (30, 40 + number, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PPM")
    return buffer.getvalue()


def part(numbers: range, label: Any = None, **more: Any) -> Any:
    """Rows of pictures of these numbers, labelled by turns."""
    columns = {
        "img": [{"bytes": encoded(number), "path": None} for number in numbers],
        "label": [number % 2 for number in numbers],
        **{key: [make(number) for number in numbers] for key, make in more.items()},
    }
    kinds = {key: datasets.Value("string") for key in more} | {"img": datasets.Image()}
    features = datasets.Features(kinds | {"label": label or datasets.ClassLabel(names=NAMES)})
    return datasets.Dataset.from_dict({key: columns[key] for key in features}, features=features)


def a_saved_set_reads_as_its_pictures_in_a_folder(tmp_path: Path) -> None:
    parts = {"train": part(range(10)), "test": part(range(10, 14)), "validation": part(range(14, 20))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    train, val = load("saved", tmp_path, resized_crop=True)
    assert (train.classes, len(train), len(val)) == (("bee", "ant"), 10, 6)
    assert train.notes == ("hf:saved: to train on its part train, to validate on validation; left for the end: test",)
    for split, numbers in (("train", range(10)), ("val", range(14, 20))):
        for number in numbers:
            folder = tmp_path / "set" / split / f"{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:02}.ppm").write_bytes(encoded(number))
    # a crop's draws are keyed by the sample's id, so the whole picture is compared
    folders = folder_sets(tmp_path / "set", 16)
    for ours, theirs in zip((train, val), folders, strict=True):
        order = np.argsort(ours.labels, kind="stable")
        for mine, other in zip(ours.read(order, None), theirs.read(np.arange(len(ours)), None), strict=True):
            assert torch.equal(mine, other)
    ids = np.array([3, 0])
    assert torch.equal(pickle.loads(pickle.dumps(train)).read(ids, 1)[0], train.read(ids, 1)[0])
    assert train.fingerprint == load(str(tmp_path / "saved"), tmp_path)[0].fingerprint
    assert load("saved:val=test", tmp_path)[1].fingerprint != val.fingerprint
    datasets.DatasetDict({"train": parts["train"], "test": parts["test"]}).save_to_disk(tmp_path / "tested")
    assert [len(each) for each in load("tested", tmp_path)] == [10, 4]
    divided = load("tested", tmp_path, val_fraction=0.3)
    assert sum(map(len, divided)) == 10
    assert divided[0].notes[0] == "hf:tested: to train on its part train; left for the end: test"
    for name in ("test", "validation"):
        datasets.DatasetDict({name: part(range(20))}).save_to_disk(tmp_path / f"only {name}")
        with pytest.raises(UserError, match=r"(?s)has no part to train on: all of it is .*train=PART"):
            load(f"only {name}", tmp_path)
        with pytest.raises(UserError, match="has no part to train on"):
            load(f"only {name}:val={name}", tmp_path)
        assert sum(map(len, load(f"only {name}:train={name}", tmp_path))) == 20
    datasets.DatasetDict({"photos": part(range(20))}).save_to_disk(tmp_path / "other")
    assert sum(map(len, load("other", tmp_path))) == 20
    assert duplicates(train, val, "auto", ALONE) == []
    twins = load("saved:val=train", tmp_path)
    assert duplicates(*twins, "auto", ALONE)[0].startswith("note: 10 of 10 images to validate on are among")


def what_is_written_anew_is_no_longer_the_set_that_was_kept(tmp_path: Path) -> None:
    """Also where sizes and labels are the same, which is all that the fingerprint knows."""
    keys, fingerprints = set(), set()
    for seed in (0, 1000):
        rows = [{"bytes": encoded(number, seed), "path": None} for number in range(4)]
        features = part(range(1)).features
        made = datasets.Dataset.from_dict({"img": rows, "label": [0, 1, 0, 1]}, features=features)
        datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "again")
        train, _ = load("again", tmp_path, decode_size=18)
        keys.add(key_of(train))
        fingerprints.add(train.fingerprint)
        assert key_of(train) in keys
    assert (len(keys), len(fingerprints)) == (2, 1)


def parquet_files_and_class_folders_are_sets_too(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    part(range(20)).to_parquet(tmp_path / "files/train.parquet")
    assert load("files", tmp_path)[1].fingerprint == load("files", tmp_path, val_fraction=0.2)[1].fingerprint
    by_parquet = load("files", tmp_path, val_fraction=0.4)
    for number in range(20):
        folder = tmp_path / "folders/train" / NAMES[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.ppm").write_bytes(encoded(number))
    by_folder = load("folders", tmp_path, val_fraction=0.4)
    own = folder_sets(tmp_path / "folders", 16, val_fraction=0.4)
    assert own[1].classes == by_folder[1].classes == ("ant", "bee")
    for images in (by_parquet[1], by_folder[1], own[1]):
        held = {(images.source.read(i), images.classes[images.labels[i]]) for i in range(len(images))}
        assert held == {(own[1].source.read(i), own[1].classes[own[1].labels[i]]) for i in range(len(own[1]))}


def columns_and_classes_are_found_by_type_or_named(tmp_path: Path) -> None:
    text = datasets.Value("string")
    both = {"train": part(range(6), text), "test": part(range(6, 10), text)}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "texts")
    assert load("texts", tmp_path)[0].classes == ("0", "1")
    two = part(range(20), kind=str).cast_column("kind", datasets.ClassLabel(names=[str(i) for i in range(20)]))
    two.save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match="the columns kind and label could each be the label"):
        load("two", tmp_path, val_fraction=0.4)
    assert load("two:label=label", tmp_path, val_fraction=0.4)[0].classes == ("bee", "ant")


def classes_of_the_parts_are_matched_by_name(tmp_path: Path) -> None:
    turned, other = datasets.ClassLabel(names=NAMES[::-1]), datasets.ClassLabel(names=["bee", "cat"])
    parts = {"train": part(range(6)), "validation": part(range(6), turned), "test": part(range(6), other)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "turned")
    train, val = load("turned", tmp_path)
    assert (train.classes, val.classes) == (("bee", "ant"),) * 2
    assert (train.labels.tolist(), val.labels.tolist()) == ([0, 1] * 3, [1, 0] * 3)
    for data in ({}, {"val_fraction": 0.1}):  # which is no way out of it
        with pytest.raises(UserError, match=r"classes that are not among those to train on: cat\n  Give") as caught:
            load("turned:val=test", tmp_path, **data)
        assert "--val-fraction" not in caught.value.remedy


def a_row_without_a_picture_is_named_or_left_out(tmp_path: Path) -> None:
    """Also where the set is divided by what its pictures hold."""
    whole = part(range(20))
    rows: list[Any] = [{"bytes": encoded(number), "path": None} for number in range(20)]
    rows[6] = rows[7] = None
    made = datasets.Dataset.from_dict({"img": rows, "label": whole["label"]}, features=whole.features)
    made.save_to_disk(tmp_path / "holes")
    both = load("holes", tmp_path, val_fraction=0.3)
    assert sum(map(len, both)) == 20
    (images, sample), _ = [
        (each, row) for each in both for row in range(len(each)) if each.source.key(row) in ("6", "7")
    ]
    with pytest.raises(UserError, match=r"hf:holes\[6\] .*cannot be read as an image: it is empty, 0 bytes"):
        images.read(np.array([sample]))
    with pytest.raises(UserError, match=r"2 picture.s. of hf:holes are empty files: hf:holes\[6\], hf:holes\[7\]"):
        assert images.fingerprint
    left = keep(both, str(tmp_path / "kept"), True, ALONE)
    assert sum(map(len, left)) == 18


def what_can_not_be_used_says_why(tmp_path: Path) -> None:
    whole = part(range(4))
    hidden = datasets.Dataset.from_dict(
        {"img": [{"bytes": encoded(1), "path": None}], "label": [-1]}, features=whole.features
    )
    datasets.DatasetDict({"train": whole, "test": hidden}).save_to_disk(tmp_path / "hidden")
    datasets.DatasetDict({"a": whole, "b": whole}).save_to_disk(tmp_path / "odd")
    datasets.Dataset.from_dict({"x": ["text"], "label": ["a"]}).save_to_disk(tmp_path / "texts")
    (tmp_path / "empty").mkdir()
    several = datasets.Sequence(datasets.ClassLabel(names=NAMES))
    whole.map(lambda row: {"label": [row["label"]]}).cast_column("label", several).save_to_disk(tmp_path / "several")
    for name, match in (
        ("several", r"the column label holds no classes: it is (List|Sequence)\(.*ClassLabel"),
        ("hidden:label=img", r"the column img holds no classes: it is Image\("),
        ("hidden", "row 0 has the label -1, which is no class"),
        ("odd", "no part to train on among a, b"),
        ("odd:train=c", "has no part c"),
        ("texts", "no column is the image"),
        ("texts:image=y", "has no column y"),
        ("texts:image=x", "the column x holds no pictures"),
        ("empty", "the folder .*empty can't be read as a data set"),
        ("some/set", "is no folder here and can't be had from the hub"),
        ("hidden:picture=x", "unknown option of hf: 'picture'"),
    ):
        with pytest.raises(UserError, match=match) as caught:
            load(name, tmp_path, val_fraction=0.0)
        assert caught.value.remedy, name
