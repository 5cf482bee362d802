"""--dataset table:FILE: pictures by a table of (path, label[, split])."""

import csv
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.config import Config, DataConfig, Execution, ModelConfig
from lockstep.data.adapters import load_adapted, read_rows
from lockstep.data.sources import load, to_evaluate
from lockstep.distributed.world import World
from lockstep.errors import UserError, shown
from tests.data.formats import Pair, folder_sets, picture_sets, write_folders
from tests.data.test_division import held, pictures, write
from tests.ranks import run_ranks
from tests.training.test_resume import end_of, trained

ALONE = World.single()


def sets(file: Path, options: str = "", **data: Any) -> Pair:
    return picture_sets(f"table:{file}{options}", file.parent, image_size=8, **data)


def listed(root: Path, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ("path", "label", "split")) -> Path:
    with (root / "list.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return root / "list.csv"


ROWS = [
    ("ant/0.png", "ant", "train"),
    ("bee/0.png", "bee", "train"),
    ("bee/1.png", "bee", "val"),
    ("ant/1.png", "ant", "val"),
]


def test_the_order_of_rows_and_the_way_of_writing_are_nothing(tmp_path: Path) -> None:
    write(tmp_path, pictures(3))
    train, val = sets(listed(tmp_path, ROWS))
    assert held(train) == [("ant/0.png", 0), ("bee/0.png", 1)]
    assert held(val) == [("ant/1.png", 0), ("bee/1.png", 1)]
    assert (train.classes, train.name) == (("ant", "bee"), str(tmp_path / "list.csv"))
    rows = [("./" + path, label, split.upper()) for path, label, split in ROWS]
    rows[0] = (str(tmp_path / "bee/../ant/0.png"), "ant", "training")
    random.Random(0).shuffle(rows)
    header = "File,extra,Class,split"
    texts = {
        "crlf.csv": "\r\n".join([header, *(f"{p},x,{c},{s}" for p, c, s in rows)]),
        "quotes.csv": "\n".join([header, "", *(f'"{p}","a ""b"",\nc",{c},{s}' for p, c, s in rows), ""]),
        "semicolons.csv": "\n".join([header, *(f"{p},x,{c},{s}" for p, c, s in rows)]).replace(",", ";"),
        "pipes.csv": "\n".join([header, *(f"{p},x,{c},{s}" for p, c, s in rows)]).replace(",", "|"),
        "stated.csv": "sep=;\n" + "\n".join([header, *(f"{p},x,{c},{s}" for p, c, s in rows)]).replace(",", ";"),
        "tabs.tsv": "\n".join([header, *(f"{p},x,{c},{s}" for p, c, s in rows)]).replace(",", "\t"),
    }
    for name, text in texts.items():
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"):
            (tmp_path / name).write_bytes(text.encode(encoding))
            again = sets(tmp_path / name)
            assert [each.fingerprint for each in again] == [train.fingerprint, val.fingerprint], (name, encoding)
            assert [held(each) for each in again] == [held(train), held(val)], (name, encoding)


def test_columns_are_named_where_they_are_called_otherwise(tmp_path: Path) -> None:
    write(tmp_path, pictures(3))
    rows = [(path, "no", label, split) for path, label, split in ROWS]
    file = listed(tmp_path, rows, ("photo", "class", "breed", "fold"))
    train, val = sets(file, ":path=photo,label=breed,split=fold")
    assert (held(train), len(val)) == ([("ant/0.png", 0), ("bee/0.png", 1)], 2)
    for options, match in (
        ("", "no column is the path among photo, class, breed, fold"),
        (":path=photo,label=race", "no column race"),
        (":paths=photo", r"unknown option of table: 'paths'\n  .* A colon in a file's name begins options"),
        (":path=", "path is empty"),
    ):
        with pytest.raises(UserError, match=match) as caught:
            sets(file, options)
        assert caught.value.remedy
    with pytest.raises(UserError, match="the columns path and file could each be the path"):
        sets(listed(tmp_path, [("a", "b", "c")], ("path", "file", "label")))


def test_what_is_validated_on(tmp_path: Path) -> None:
    write(tmp_path, pictures(30))
    rows = [(path, path.split("/")[0]) for path in pictures(30)]
    plain = listed(tmp_path, rows, ("path", "label"))
    assert [each.fingerprint for each in sets(plain)] == [each.fingerprint for each in sets(plain, val_fraction=0.2)]
    divided = sets(plain, val_fraction=0.3)
    folder = picture_sets("folder", tmp_path, val_fraction=0.3)
    assert [each.fingerprint for each in divided] == [each.fingerprint for each in folder]
    with pytest.raises(UserError, match="says already what to validate on"):
        sets(listed(tmp_path, ROWS), val_fraction=0.3)
    tested = [(path, label, "test") for path, label, _ in ROWS[2:]]
    _, val = sets(listed(tmp_path, [*ROWS[:2], *tested]))
    assert len(val) == 2
    rest = [(path, label, "test") for path, label in rows[:9]]
    divided = sets(listed(tmp_path, [*((path, label, "train") for path, label in rows[9:]), *rest]), val_fraction=0.3)
    assert sum(map(len, divided)) == len(rows) - len(rest), "the test is left for the end, as a folder's"
    assert divided[0].notes[0] == f"table:{tmp_path}/list.csv: to train on its part train; left for the end: test"
    train, val = sets(listed(tmp_path, [*ROWS, ("ant/2.png", "ant", "test")]))
    where = f"table:{tmp_path}/list.csv"
    assert train.notes == (f"{where}: to train on its part train, to validate on val; left for the end: test",)
    assert len(val) == 2


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_lone_part_that_is_not_to_train_on_is_evaluated_and_not_trained_on(tmp_path: Path, split: str) -> None:
    write(tmp_path, pictures(3))
    file = listed(tmp_path, [(path, label, split) for path, label, _ in ROWS])
    with pytest.raises(UserError, match=f"list.csv has no part to train on: all of it is {split}\n  Give rows"):
        sets(file)
    with pytest.raises(UserError, match=r"no part to train on among val, test\n  Give rows"):
        sets(listed(tmp_path, [*((path, label, "val") for path, label, _ in ROWS), ("ant/2.png", "ant", "test")]))
    file = listed(tmp_path, [(path, label, split) for path, label, _ in ROWS])
    assert len(to_evaluate(str(file), "", 8, False, ALONE)) == len(ROWS)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "has no rows"),
    "only a header": (b"path,label\n", "has no rows"),
    "latin-1": (b"path,label\na.png,caf\xe9\n", r"is not UTF-8: line 2 has the byte 0xe9"),
    "torn utf-16": ("path,label\nx,y\n".encode("utf-16") + b"\xd8", r"is not UTF-16: line "),
    "parquet": (b"PAR1\x15\x04", "is a parquet file"),
    "a workbook": (b"PK\x03\x04\x14\0", "is a workbook"),
    "colons between its fields": (b"path:label\nant/0.png:ant\n", "has one column: path:label\n  It needs one"),
    "no header": (b"ant/0.png,ant\nant/1.png,ant\n", "no column is the path"),
    "an open quote": (
        b'path,label\nant/0.png,ant\n\n"ant/1.png,ant\n' + b"ant/2.png,ant\n" * 9, "in the row that begins at line 4",
    ),
    "a torn quote": (b'path,label\n"ant"/0.png,ant\n', "is damaged in the row that begins at line 2"),
    "too many fields": (b"path,label\nant/0.png,ant,x\n", r"line 2: 3 field\(s\), and the first line has 2"),
    "too few": (b"path,label\n\nant/0.png\n", r"line 3: 1 field\(s\)"),
    "an empty label": (b"path,label\nant/0.png,ant\nant/1.png, \n", "line 3: no label"),
    "an empty path": (b"path,label\n,ant\n", "line 2: no path"),
    "a zero byte": (b"path,label\na\0b.png,ant\n", "line 2: the path .* has a zero byte"),
    "a label on two lines": (b'path,label\nant/0.png,"an\nt"\n', r"line 2: the label an\\nt has a line break"),
    "a huge field": (b"path,label\n" + b"x" * 200_000 + b",ant\n", "line 2: field larger than field limit"),
    "a long path": (b"path,label\n" + b"x" * 5_000 + b".png,ant\n", r"names 1 file\(s\) that are not there: line 2"),
    "missing": (
        b"path,label\nant/0.png,ant\nant/x.png,ant\nant/y.png,ant\n",
        r"2 file\(s\) .*: line 3: ant/x.png, line 4",
    ),
    "a folder": (b"path,label\nant,ant\n", r"names 1 file\(s\) that are not there"),
    "a file as folder": (b"path,label\nant/0.png/1.png,ant\n", r"names 1 file\(s\) that are not there"),
    "twice": (b"path,label\nant/0.png,ant\n./ant/0.png,bee\n", "line 3: ant/0.png stands there twice, also in line 2"),
    "a strange split": (b"path,label,split\nant/0.png,ant,fold 1\n", "line 2: the split is 'fold 1'"),
    "half a split": (b"path,label,split\nant/0.png,ant,train\nant/1.png,ant,\n", "line 3: the split is ''"),
    "a class to validate alone": (
        b"path,label,split\nant/0.png,ant,train\nbee/0.png,bee,val\n", "line 3: the class bee is not among",
    ),
    "above": (b"path,label\n../secret.png,ant\n", "line 2: ../secret.png lies outside of"),
    "absolute": (b"path,label\n%SECRET%,ant\n", r"lies outside of"),
    "a link": (b"path,label\nant/link.png,ant\n", r"line 2: ant/link.png lies outside of"),
    "through a link": (b"path,label\nelsewhere/secret.png,ant\n", r"elsewhere/secret.png lies outside of"),
    "a dead link": (b"path,label\nant/dead.png,ant\n", r"names 1 file\(s\) that are not there"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_table_ends_with_one_sentence(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "set"
    write(root, pictures(3))
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (root / "ant/link.png").symlink_to(secret)
    (root / "ant/dead.png").symlink_to("nowhere")
    (root / "elsewhere").symlink_to(tmp_path)
    content, match = HOSTILE[kind]
    (root / "list.csv").write_bytes(content.replace(b"%SECRET%", str(secret).encode()))
    with pytest.raises(UserError, match=match) as caught:
        sets(root / "list.csv", val_fraction=0.3)
    assert caught.value.message.isprintable()
    assert caught.value.remedy
    if "outside" in match:
        assert "--follow-links" in caught.value.remedy
        train, _ = load_adapted(DataConfig(dataset=f"table:{root / 'list.csv'}", follow_links=True), root, ALONE)
        assert train.source.read(0) == b"secret"


def test_backslashes_are_named(tmp_path: Path) -> None:
    write(tmp_path, pictures(3))
    with pytest.raises(UserError) as caught:
        sets(listed(tmp_path, [("ant\\0.png", "ant")], ("path", "label")))
    assert "Write paths with /" in caught.value.remedy


def test_a_table_that_is_not_there_is_named_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"there is no table .*gone.csv or {tmp_path}/gone.csv"):
        load(DataConfig(dataset="table:gone.csv"), tmp_path, 0, ALONE)
    with pytest.raises(UserError, match="names nothing"):
        load(DataConfig(dataset="table:"), tmp_path, 0, ALONE)


def caught(do: Callable[[], Any]) -> tuple[Any, UserError | None]:
    """What it returns, or its error, which is one sentence and has a remedy."""
    try:
        return do(), None
    except UserError as error:
        made = error
    assert shown(made.message) == made.message
    assert made.remedy
    return None, made


fields = st.text(st.characters(codec="utf-8"), max_size=6)


@settings(max_examples=60)
@example([("ant/0.png", "red\xa0ant")])  # a spreadsheet's space
@given(st.lists(st.tuples(fields, fields), max_size=5))
def test_what_a_csv_writer_wrote_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    """Whatever text stands in the fields, each sound row comes back as it was."""
    file = listed(tmp_path_factory.mktemp("table"), rows, ("path", "label"))
    sound = [
        (path.strip(), label.strip())
        for path, label in rows
        if path.strip() and label.strip() == shown(label.strip()) and label.strip() and "\0" not in path
    ]
    found, error = caught(lambda: read_rows(file, {}))
    if error is not None:
        assert len(sound) < len(rows) or not rows
    else:
        assert [(row.path, *row.labels) for row in found] == sound
        assert len(sound) == len(rows)


@settings(max_examples=100)
@given(st.one_of(st.binary(max_size=60), st.text(alphabet='path,label;\t"\n\r\0é/. x1', max_size=60).map(str.encode)))
def test_any_bytes_are_a_table_or_one_sentence(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    root = tmp_path_factory.mktemp("bytes")
    for content in (raw, b"path,label\n" + raw):
        (root / "list.csv").write_bytes(content)
        found, error = caught(lambda: load_adapted(DataConfig(dataset=f"table:{root / 'list.csv'}"), root, ALONE))
        for part in () if error is not None else filter(None, found):
            assert len(part)
            assert all(part.source.path(sample).is_relative_to(root) for sample in range(len(part)))


def of_both(world: World, root: str, out: str) -> list[str]:
    """The weights' digests after training on a folder and on a table of the same files, in exact mode."""
    digests = []
    for name in ("folder", f"table:{root}/list.csv"):
        folder = f"{out}/{name[:5]}-{world.size}"
        config = Config(
            epochs=1,
            batch_size=6,
            exact=3,
            data=DataConfig(dataset=name, image_size=16, resized_crop=True, flip=True),
            model=ModelConfig(model="mlp"),
            execution=Execution(data_dir=root, workers=0, device="cpu"),
        )
        trained(world, config, folder)
        world.barrier()
        digests.append(end_of(Path(folder))["weights_sha256"])
    return digests


def test_a_folder_and_its_table_train_to_the_same_weights_on_any_number_of_ranks(tmp_path: Path) -> None:
    write_folders(tmp_path, count=5)
    rows = [(f"{split}/{name}/{i}{'.png' if i % 2 == 0 else '.jpg'}", name, split)
            for split in ("val", "train") for i in range(5) for name in ("bee", "ant")]  # fmt: skip
    listed(tmp_path, rows)
    (digest,) = set(of_both(ALONE, str(tmp_path), str(tmp_path / "out")))
    assert run_ranks(of_both, 3, str(tmp_path), str(tmp_path / "out"), timeout=240) == [[digest, digest]] * 3
    train, _ = sets(tmp_path / "list.csv")
    folders, _ = folder_sets(tmp_path, 8)
    ids = np.arange(len(train))
    assert bool((train.read(ids, None)[0] == folders.read(ids, None)[0]).all())
