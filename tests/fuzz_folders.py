"""Folders and tables of pictures as people and systems leave them, read by Lockstep and counted by a plain walk.

    python -m tests.fuzz_folders [COUNT] [SEED]

The counting is written from the rules of docs/photos.md, not from the code. Each difference is printed with the number
that makes it again.
"""

# ruff: noqa: PTH103, PTH110, PTH112, PTH113, PTH114, PTH118, PTH119, PTH123, PTH208, PTH211
# names are bytes here, which pathlib does not take

import csv
import io
import os
import random
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lockstep.config import DataConfig
from lockstep.data.folders import image_files, load_part
from lockstep.data.picture_set import PictureSet
from lockstep.data.sources import load
from lockstep.distributed.world import World
from lockstep.errors import UserError

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "eval", "evaluation", "dev"),
    "test": ("test", "testing"),
}
LEFT_BEHIND = (
    *("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information", "Thumbs.db", "desktop.ini"),
    *("#recycle", "@Recycle", "__pycache__"),
)
HIDDEN = (".ipynb_checkpoints", ".Trash-1000", ".thumbnails", ".DS_Store", "._0.jpg", ".git")
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".gif", ".avif")
CLASSES = (
    *("ant", "Bee", "cow", "dog house", "train", "Caf\u00e9", "\u72d7", "\u732b \u732b", "b", "it's", "a,b", "x;y|z"),
    *("e\u0301clair", "\u00fcber", "0", "test cat", "valley", "\u202eevil"),
)
Counts = dict[str, int]
Refused = str


class Writer:
    """Writes one folder; every picture has a content of its own."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self.root, self.rng, self.number = root, rng, 0

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def picture(self, folder: bytes) -> bytes:
        os.makedirs(folder, exist_ok=True)
        self.number += 1
        ending = self.rng.choice(PICTURES)
        ending = ending.upper() if self.maybe(0.2) else ending
        stem = os.fsencode(f"{self.number}") if self.maybe(0.9) else b"caf\xe9" + str(self.number).encode()
        path = os.path.join(folder, stem + ending.encode())
        with open(path, "wb") as file:
            file.write(f"picture {self.number}".encode())
        return path

    def class_folder(self, parent: bytes, name: bytes, count: int) -> None:
        folder = os.path.join(parent, name)
        os.makedirs(folder, exist_ok=True)
        inner = [folder, os.path.join(folder, b"more"), os.path.join(folder, b"more", b"test")]
        for _ in range(count):
            path = self.picture(self.rng.choice(inner) if self.maybe(0.2) else folder)
            if self.maybe(0.005):
                self.odd(path)
        if self.maybe(0.2):
            self.left_behind(folder)
        for other in ("notes.txt", "labels.json", "README"):
            if self.maybe(0.1):
                Path(os.fsdecode(os.path.join(folder, other.encode()))).touch()

    def odd(self, beside: bytes) -> None:
        """Something called as a picture that is none of the folder's own."""
        path = beside + b".png"
        what = self.rng.choice(("fifo", "dangling", "same", "outside", "loop"))
        if what == "fifo":
            os.mkfifo(path)
        elif what == "dangling":
            os.symlink(b"nowhere.png", path)
        elif what == "same":
            os.symlink(os.path.basename(beside), path)
        elif what == "outside":
            os.symlink(os.fsencode(self.root.parent / "outside.png"), path)
        else:
            os.symlink(b"..", beside + b"-up")

    def left_behind(self, folder: bytes) -> None:
        for name in self.rng.sample((*LEFT_BEHIND, *HIDDEN), 3):
            path = os.path.join(folder, (name.swapcase() if self.maybe(0.2) and name[0] != "." else name).encode())
            if self.maybe(0.5):
                self.picture(os.path.join(path, b"deeper") if self.maybe(0.3) else path)
            elif not os.path.exists(path):
                Path(os.fsdecode(path)).write_bytes(b"system")

    def split(self, parent: bytes, classes: list[bytes], empty: float) -> None:
        for name in classes:
            count = 0 if self.maybe(empty) else self.rng.choice((1, 2, 3, 5, 8, 100 if self.maybe(0.1) else 4))
            if self.maybe(0.3):  # a Mac's way of writing it
                name = os.fsencode(unicodedata.normalize(self.rng.choice(("NFC", "NFD")), os.fsdecode(name)))
            self.class_folder(parent, name, count)


def write_folder(root: Path, rng: random.Random) -> None:
    """Class folders alone, or splits of any name; with what lies around."""
    root.mkdir()
    (root.parent / "outside.png").write_bytes(b"elsewhere")
    writer, top = Writer(root, rng), os.fsencode(root)
    classes = [os.fsencode(name) for name in rng.sample(CLASSES, rng.randint(2, 6))]
    if writer.maybe(0.1):
        classes.append(b"caf\xe9")
    flat = writer.maybe(0.4)
    if flat:
        writer.split(top, classes, empty=0.03)
    named: list[str] = []
    if not flat or writer.maybe(0.2):
        usual = ["train", *rng.sample(("val", "test"), rng.randint(0, 2))]
        for split in usual if writer.maybe(0.8) else [*usual[1:], rng.choice(usual)]:
            name = rng.choice(SPLITS[split]) + rng.choice(("", "", "", "_set", "-images", " data", "set"))
            named.append(rng.choice((str.lower, str.upper, str.title))(name))
            kept = (
                classes if split == "train" or writer.maybe(0.7) else rng.sample(classes, rng.randint(0, len(classes)))
            )
            kept = [*kept, b"stranger"] if writer.maybe(0.05) else kept
            writer.split(os.path.join(top, named[-1].encode()), kept, empty=0.03 if split == "train" else 0.15)
            if writer.maybe(0.1):
                writer.picture(os.path.join(top, named[-1].encode()))
    if writer.maybe(0.15):
        writer.picture(os.path.join(top, rng.choice((b"Train", b"Testing", b"validation", b"extra"))))
    if writer.maybe(0.3):
        writer.left_behind(top)
    if writer.maybe(0.03):
        os.symlink(b"unmounted", os.path.join(top, b"eel"))
    if writer.maybe(0.2):
        writer.picture(top)


# ---- the rules of the page


class No(Exception):
    """What the page says is refused."""


def visible(folder: str) -> list[str]:
    ignored = {name.lower() for name in LEFT_BEHIND}
    return sorted(name for name in os.listdir(folder) if name[0] != "." and name.lower() not in ignored)


def folders_in(folder: str) -> list[str]:
    return [name for name in visible(folder) if os.path.isdir(os.path.join(folder, name))]


def split_of(name: str) -> str:
    plain = name.lower()
    for ending in ("set", "data", "images"):
        plain = plain.removesuffix(ending)
    plain = plain.rstrip("-_ ") if plain != name.lower() else plain
    return next((split for split, names in SPLITS.items() if plain in names), "")


def pictures_below(top: str, may_leave: str) -> int:
    """Pictures in a folder and all below it; `may_leave`: the folder out of which no link may lead."""
    count = 0
    for here, inner, files in os.walk(top):
        inner[:] = [name for name in inner if name in visible(here)]
        for name in (name for name in files if name in visible(here) and name.lower().endswith(PICTURES)):
            path = os.path.join(here, name)
            if not os.path.isfile(path):
                raise No(f"{path!r} is no file")
            if os.path.islink(path) and not os.path.realpath(path).startswith(os.path.realpath(may_leave) + os.sep):
                raise No(f"{path!r} leads out")
            count += 1
        for name in inner:
            if os.path.islink(os.path.join(here, name)):  # all of the fuzzer's lead to a folder above
                raise No(f"{name!r} has no end")
    return count


def class_of(name: str) -> str:
    return unicodedata.normalize("NFC", os.fsencode(name).decode("utf-8", "backslashreplace"))


def count_split(folder: str, classes: list[str], may_lack: bool) -> Counts:
    found: Counter[str] = Counter()
    for name in visible(folder):
        if os.path.islink(os.path.join(folder, name)) and not os.path.exists(os.path.join(folder, name)):
            raise No(f"{name!r} may have been a class")
    for name in classes:
        found[class_of(name)] += pictures_below(os.path.join(folder, name), folder)
    if not found.total() or (not may_lack and 0 in found.values()):
        raise No(f"no picture in {folder!r}, or in a class of it")
    return dict(found)


def expected(root: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The folder of each split, and the class folders in it."""
    top = os.fspath(root)
    splits: dict[str, str] = {}
    bare, plain = [], []
    for name in folders_in(top):
        if not split_of(name):
            plain.append(name)
        elif not folders_in(os.path.join(top, name)):
            bare.append(name)
        elif split_of(name) in splits:
            raise No(f"two folders for {split_of(name)}")
        else:
            splits[split_of(name)] = os.path.join(top, name)
    classes = {split: folders_in(folder) for split, folder in splits.items()}
    if "train" not in splits and plain:
        splits["train"] = top
        classes["train"] = plain + (bare if [name.lower() for name in bare] == ["train"] else [])
    if not splits:
        raise No("no class folders")
    return splits, classes


def to_train(root: Path) -> tuple[Counts, Counts | None]:
    """Pictures of each class to train on, and to validate on; None: of all together a part is validated on."""
    splits, classes = expected(root)
    if "train" not in splits:
        raise No("nothing to train on")
    train = count_split(splits["train"], classes["train"], may_lack=False)
    held = "val" if "val" in splits else "test"
    if held not in splits:
        if max(train.values()) < 2:
            raise No("no class can be divided")
        return train, None
    val = count_split(splits[held], classes[held], may_lack=True)
    if not val.keys() <= train.keys():
        raise No("a class that is only validated on")
    return train, val


def to_evaluate(root: Path) -> Counts:
    splits, classes = expected(root)
    part = next(split for split in ("val", "test", "train") if split in splits)
    return count_split(splits[part], classes[part], may_lack=True)


# ---- what Lockstep makes of it


def counted(images: PictureSet) -> Counts:
    """As an oracle counts: classes without a picture too."""
    return {name: int((images.labels == k).sum()) for k, name in enumerate(images.classes)}


def asked(what: Callable[[], object]) -> object:
    """What it gives; the word refused for a UserError on one line and with a remedy, or for the page's No."""
    said = None
    try:
        return what()
    except No:
        return "refused"
    except UserError as error:
        said = error
    assert said.message.isprintable(), repr(said.message)
    assert said.remedy, said.message
    return "refused"


def trained(name: str, root: Path, divided: bool) -> tuple[Counts, Counts | None]:
    train, val = load(DataConfig(dataset=name, image_size=8), root, 0, World.single())
    assert isinstance(train, PictureSet)
    assert isinstance(val, PictureSet)
    assert train.classes == val.classes
    both = {k: counted(train)[k] + counted(val)[k] for k in train.classes}
    if divided:
        assert all(counted(train)[k] and counted(val)[k] for k in both if both[k] > 1), "a class without a side"
        return both, None
    return counted(train), {k: n for k, n in counted(val).items() if n}


def without_zeros(found: object) -> object:
    """A validation set's classes without a picture may be named or not."""
    if isinstance(found, tuple) and isinstance(found[1], dict):
        return found[0], {name: count for name, count in found[1].items() if count}
    return {name: count for name, count in found.items() if count} if isinstance(found, dict) else found


def compare_folder(scratch: Path, rng: random.Random) -> list[str]:
    """What differs between Lockstep and the page for one folder."""
    root = scratch / "set"
    write_folder(root, rng)
    wanted = without_zeros(asked(lambda: to_train(root)))
    divided = isinstance(wanted, tuple) and wanted[1] is None
    pairs = {
        "train": (wanted, asked(lambda: trained("folder", root, divided))),
        "eval": (
            without_zeros(asked(lambda: to_evaluate(root))),
            without_zeros(asked(lambda: counted(load_part(root, False)))),
        ),
        "predict": (
            asked(lambda: pictures_below(os.fspath(root), os.fspath(root))),
            asked(lambda: len(image_files(root))),
        ),
    }
    return [f"{what}: page {ours}, Lockstep {theirs}" for what, (ours, theirs) in pairs.items() if ours != theirs]


def compare_table(scratch: Path, rng: random.Random) -> list[str]:
    """What differs for one table: its rows are known, and which faults it has."""
    root = scratch / "set"
    writer, faults = Writer(root, rng), 0
    classes = rng.sample([name for name in CLASSES if name.isprintable()], rng.randint(1, 4))
    splits = rng.choice(([""], ["train", "val"], ["Training", "validation", "TEST"], ["train", "test"]))
    rows: list[tuple[str, str, str]] = []
    for name in classes:
        for split in splits:
            for _ in range(rng.randint(2, 6)):
                file = Path(os.fsdecode(writer.picture(os.fsencode(root / f"pictures of {len(rows) % 3}"))))
                if not file.name.isascii():
                    file = file.rename(file.with_name(f"\u00e9{writer.number}{file.suffix}"))
                rows.append((f"{file.relative_to(root)}", name, split))
    rng.shuffle(rows)
    if writer.maybe(0.3):
        fault, place = (
            rng.choice(("missing", "twice", "no label", "stranger", "outside", "no path")),
            rng.randrange(len(rows)),
        )
        path, name, split = rows[place]
        if fault == "stranger":
            rows[place] = (path, "only here", splits[1]) if len(splits) > 1 else rows[place]
            faults += len(splits) > 1
        else:
            (root.parent / "outside.png").write_bytes(b"elsewhere")
            rows[place] = {
                "missing": ("gone.png", name, split),
                "twice": (rows[place - 1][0], name, split),
                "no label": (path, "", split),
                "outside": ("../outside.png", name, split),
                "no path": ("", name, split),
            }[fault]
            faults += fault != "twice" or len(rows) > 1
    header = [rng.choice(("path", "file", "Image", "filename")), rng.choice(("label", "Class", "target")), "split"]
    columns = [0, 1] + ([2] if splits != [""] else [])
    separator, out = rng.choice(",;\t|"), io.StringIO()
    csv.writer(out, delimiter=separator, lineterminator=rng.choice(("\n", "\r\n"))).writerows(
        [[row[k] for k in columns] for row in (header, *rows)]
    )
    text = out.getvalue()
    encoding = rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "latin-1", "gb18030"))
    try:
        raw = text.encode(encoding)
    except UnicodeEncodeError:
        encoding, raw = "utf-8", text.encode()
    if encoding in ("latin-1", "gb18030"):  # a guess at an encoding would be wrong now and then
        try:
            raw.decode("utf-8")
            raw = text.encode()
        except UnicodeDecodeError:
            faults += 1
    (root / "list.csv").write_bytes(raw)
    by_split: dict[str, Counter[str]] = {}
    for _, name, split in rows:
        by_split.setdefault(split_of(split) or "train", Counter())[unicodedata.normalize("NFC", name)] += 1
    held = by_split.get("val") or by_split.get("test")
    wanted: object = "refused" if faults else (dict(by_split["train"]), dict(held) if held else None)
    found = asked(lambda: trained("table:list.csv", root, held is None))
    return [] if wanted == found else [f"table ({encoding}, {separator!r}): rows {wanted}, Lockstep {found}"]


def differences(number: int) -> list[str]:
    """Of one folder or table, made from a number."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as scratch:
        return (compare_table if number % 3 == 0 else compare_folder)(Path(scratch), rng)


def main() -> int:
    count, seed = (
        (int(word) for word in [*sys.argv[1:], "300", "0"][:2]) if len(sys.argv) != 2 else (int(sys.argv[1]), 0)
    )
    wrong = 0
    for number in range(seed, seed + count):
        for line in differences(number):
            wrong += 1
            print(f"{number}: {line}")
    print(f"{count} folders and tables from {seed} on, differences: {wrong}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
