"""Class folders on the disk: which of them are splits, which entries are no images, and what is refused.

The rule, which docs/photos.md tells: a folder called train, val or test in one of the usual ways is a split where it
holds folders. Without splits the folders are classes.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.data.picture_set import EXTENSIONS, Files, PictureSet, class_name, refused
from lockstep.errors import shown

_OF_SYSTEMS = {
    *("__macosx", "@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "$recycle.bin", "lost+found"),
    *("system volume information", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__pycache__"),
}
_IGNORED = "hidden or a system's"
_UNMISSED = (".ds_store", "thumbs.db", "desktop.ini")  # not worth a note
_NAMES = {"train": "train|training", "val": "val|valid|validation|eval|evaluation|dev", "test": "test|testing"}
_SPLITS = {split: re.compile(rf"({names})([-_ ]?(set|data|images))?") for split, names in _NAMES.items()}
_LAYOUT = "Lay the images out as train/CLASS/FILE and val/CLASS/FILE, or as CLASS/FILE alone."


def is_ignored(name: str) -> bool:
    """True for an entry, at any depth, that is hidden or that a system has left: no picture, class or split."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def split_of(name: str) -> str:
    """train, val or test for one of the usual names of these, in any case; else empty."""
    return next((split for split, names in _SPLITS.items() if names.fullmatch(name.strip().lower())), "")


def held_split(splits: Container[str], val_fraction: float) -> str:
    """The split to validate on: val, else test. None, "", where there is neither, or where a part is to be chosen
    (`val_fraction`): then a test stays for the end."""
    return "val" if "val" in splits else "" if val_fraction or "test" not in splits else "test"


@dataclass(frozen=True)
class Layout:
    """Where the class folders of each split are ("train": maybe the data folder itself), and what is left alone."""

    root: Path
    splits: dict[str, Path]
    others: tuple[str, ...]  # folders of the root that are neither splits nor classes

    def scan(self, split: str, follow_links: bool, may_lack: bool = False) -> PictureSet:
        """The images of a split's class folders, in the order of classes and paths, however the disk lists them.

        Folders whose names are the same text in other normal forms of Unicode are one class. `may_lack`: a class may be
        without an image.
        """
        root = self.splits[split]
        no_classes = (*self.others, *(path.name for path in self.splits.values())) if root == self.root else ()
        inside = "" if follow_links else os.path.realpath(root)
        top, classes = (os.path.realpath(root),), dict[str, list[str]]()
        for name in _folders(root, of_classes=True):
            if name not in no_classes:
                classes.setdefault(class_name(name), []).append(name)
        if not classes:
            raise refused(f"{root} holds no class folders", _LAYOUT)
        left = Counter(filter(None, map(_beside_classes, os.scandir(root))))
        found: list[bytes] = []
        labels: list[int] = []
        for label, (_, folders) in enumerate(sorted(classes.items())):
            files = []
            for folder in folders:
                _require_inside(root / folder, inside)
                files += [f"{folder}/{file}" for file in _images(root / folder, "", inside, top, left)]
            if not files and not may_lack:
                remedy = f"Put images there ({', '.join(EXTENSIONS)}), or remove the folder from every split."
                raise refused(f"the class folder {root / folders[0]} holds no image", remedy)
            found += map(os.fsencode, sorted(files))
            labels += [label] * len(files)
        if not found:
            raise refused(f"{root} holds no image", f"Images end in {', '.join(EXTENSIONS)}.")
        left_out = ", ".join(f"{count:,} {kind}" for kind, count in left.most_common(5))
        left_out += f" and {len(left) - 5} more kinds" if len(left) > 5 else ""
        source = Files(root, found)
        return PictureSet(source.name, tuple(sorted(classes)), np.array(labels, np.int64), source, left_out=left_out)

    def note(self, *used: str) -> tuple[str, ...]:
        """The rule's outcome in one line; none where it is train/ and val/ alone, or classes alone."""
        folders = [self.splits[split] for split in used]
        names = ["the class folders" if path == self.root else f"{path.name}/" for path in folders]
        alone = [path.name for path in self.splits.values() if path not in folders] + list(self.others)
        if not alone and names in (["the class folders"], ["train/", "val/"]):
            return ()
        what = " and ".join(f"{name} to {verb} on" for name, verb in zip(names, ("train", "validate"), strict=False))
        left = f"; left alone: {', '.join(f'{shown(name)}/' for name in alone)}" if alone else ""
        return (f"images: {shown(str(self.root))}: {what}{left}",)


def layout(root: Path) -> Layout:
    """What a data folder holds. Raises UserError where that is no class folder, or two folders are the same split."""
    with _readable(root):
        there = root.is_dir()
    if not there:
        raise refused(f"there is no folder {root}", "Name the folder of the classes or splits with --data-dir DIR.")
    splits: dict[str, Path] = {}
    others, classes = [], []
    for name in (names := _folders(root)):
        split = split_of(name)
        if not split:
            classes.append(name)
        elif not _folders(root / name):
            others.append(name)
        elif split in splits:
            raise refused(f"{splits[split]} and {root / name} are both there", f"Keep one folder for {split}.")
        else:
            splits[split] = root / name
    deeper = root / classes[0] if len(classes) == 1 and not splits else None
    if deeper and any(split_of(name) and _folders(deeper / name) for name in _folders(deeper)):
        raise refused(f"{deeper} holds the splits, not {root}", f"Name it: --data-dir {shlex.quote(str(deeper))}.")
    if "train" in splits:
        return Layout(root, splits, (*others, *classes))
    if classes:
        if [name.lower() for name in others] == ["train"]:
            others = []  # a class of that name, as among vehicles
        return Layout(root, {"train": root, **splits}, tuple(others))
    if not splits:
        what = f"{' and '.join(names)} in {root} hold" if names else f"{root} holds"
        raise refused(f"{what} no class folders", f"{_LAYOUT} A table may list them: --dataset table:FILE.csv.")
    return Layout(root, splits, tuple(others))


def load_folders(root: Path, follow_links: bool, val_fraction: float) -> tuple[PictureSet, PictureSet | None]:
    """The pictures to train on, and those to validate on where a folder of their own holds them.

    `follow_links`: also out of the folders; by itself a link there would take in whatever it points to. `val_fraction`:
    if not 0, a part is to be chosen, and a test set stays for the end.
    Raises UserError for a missing or empty folder, classes that differ, and what is no readable image file or folder.
    """
    found = layout(root)
    if "train" not in found.splits:
        there = " and ".join(f"{path.name}/" for path in found.splits.values())
        raise refused(f"{root} has {there} and no folder to train on", _LAYOUT)
    if val_fraction and "val" in found.splits:
        raise refused(
            f"--val-fraction: {found.splits['val']} is there to validate on already", "Leave out one of the two."
        )
    train = found.scan("train", follow_links)
    held = held_split(found.splits, val_fraction)
    if not held:
        return replace(train, notes=found.note("train")), None
    val = found.scan(held, follow_links, may_lack=True)
    if strange := sorted(set(val.classes) - set(train.classes)):
        cases = {name.casefold(): name for name in train.classes}
        strange = [f"{c} ({cases[c.casefold()]} there)" if c.casefold() in cases else c for c in strange]
        more = f" and {len(strange) - 10} more" if len(strange) > 10 else ""
        what = f"{val.name} has classes that {train.name} has not: {', '.join(strange[:10])}{more}"
        raise refused(what, "Add them to the training folder: a validation folder may have fewer classes, not others.")
    notes = found.note("train", held)
    if absent := sorted(set(train.classes) - set(val.classes)):
        notes += (shown(f"note: {val.name} has no folder for {len(absent)} class(es): {', '.join(absent[:10])}"),)
    place = np.array([train.classes.index(name) for name in val.classes], np.int64)
    return replace(train, notes=notes), replace(val, classes=train.classes, labels=place[val.labels])


def load_part(root: Path, follow_links: bool) -> PictureSet:
    """The pictures to evaluate on: those to validate on, else those of the test, else any."""
    found = layout(root)
    return found.scan(next(each for each in ("val", "test", "train") if each in found.splits), follow_links, True)


def image_files(folder: Path, follow_links: bool = False) -> list[str]:
    """Paths of the image files below a folder, relative to it, sorted.
    Raises UserError for a link out of it (unless `follow_links`), and what is no readable image file or folder.
    """
    return sorted(_images(folder, "", "" if follow_links else os.path.realpath(folder), (), Counter()))


def _folders(folder: Path, of_classes: bool = False) -> list[str]:
    """The names of the folders right below one, without what is ignored, sorted. `of_classes`: no link to nothing."""
    with _readable(folder):
        entries = [entry for entry in os.scandir(folder) if not is_ignored(entry.name)]
        lost = [entry.path for entry in entries if of_classes and entry.is_symlink() and not Path(entry.path).exists()]
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if lost:
        raise refused(f"{lost[0]} is a link to nothing, and may have been a class", "Mount its target, or remove it.")
    return names


def _beside_classes(entry: os.DirEntry[str]) -> str:
    """What to call an entry beside the class folders that is left out, where somebody might miss it."""
    if entry.is_dir():
        return _IGNORED if is_ignored(entry.name) else ""
    return f"{Path(entry.name).suffix.lower()} beside the classes" if _is_image(entry.name) else ""


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not is_ignored(name)


def _images(folder: Path, prefix: str, inside: str, above: tuple[str, ...], others: Counter[str]) -> Iterator[str]:
    """Paths of the image files below a folder, relative to the first one. Entries that are no links cost no call.

    `inside`: the real path that links may not leave, if any; `above`: those of the folders on the way here. `others`:
    counts what is left out, by its ending.
    """
    here = os.path.realpath(folder)
    if here in above:
        raise refused(f"{folder} is a link to a folder above it", "Remove the link: it has no end.")
    with _readable(folder):
        entries = list(os.scandir(folder))
    for entry in entries:
        path = Path(entry.path)
        if is_ignored(entry.name):
            if entry.name.lower() not in _UNMISSED:
                others[_IGNORED] += 1
            continue
        image = _is_image(entry.name)
        with _readable(path):
            is_folder, is_file = entry.is_dir(), image and entry.is_file()
        if entry.is_symlink() and (is_folder or is_file):
            _require_inside(path, inside)
        if is_folder:
            yield from _images(path, f"{prefix}{entry.name}/", inside, (*above, here), others)
        elif is_file:
            yield prefix + entry.name
        elif image:
            what = "a link to nothing" if entry.is_symlink() else "no plain file"
            raise refused(f"{path} is {what}", "Replace or remove it.")
        else:
            others[path.suffix.lower() or "without an ending"] += 1


def _require_inside(path: Path, inside: str) -> None:
    if inside and path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
        what = f"{path} is a link to {os.path.realpath(path)}, outside of {inside}"
        raise refused(what, "Give --follow-links if it is yours and meant, or put the file itself there.")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise refused(f"{path} can't be read: {error.strerror}", "Remove it, or give this user the right.") from error
