"""The layout of class folders on the disk, and what in it is no image: links, FIFOs, what can't be read."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.data.folder import EXTENSIONS, FolderSet, joined
from lockstep.errors import UserError

_OF_THE_DESKTOP = (".DS_Store", "Thumbs.db", "desktop.ini")  # nobody misses these
_LAYOUT = "Lay the images out as train/CLASS/FILE and val/CLASS/FILE (or test/CLASS/FILE)."
_SPLIT = "or give --val-fraction 0.1, which validates on a tenth of the images, chosen by what they hold"


def load_folders(
    root: Path, size: int, seed: int, resized_crop: bool, follow_links: bool = False
) -> tuple[FolderSet, FolderSet]:
    """Training and validation set from `root/train` and `root/val` (or `root/test`), images `size` pixels a side.

    `follow_links`: also out of the two folders; by itself a link there would take in whatever it points to.

    Raises:
        UserError: for a missing or empty folder, classes that differ, and what is no readable image file or folder.
    """
    train_root = root / "train"
    val_root = next((root / name for name in ("val", "test") if _is_folder(root / name)), root / "val")
    for folder in (train_root, val_root):
        if not _is_folder(folder):
            split = f"{_LAYOUT[:-1]}, {_SPLIT}." if _holds_folders(root) else _LAYOUT
            raise UserError(f"there is no folder {folder}", f"{split} Name the folder above with --data-dir DIR.")
    classes, val_classes = class_names(train_root), class_names(val_root)
    if classes != val_classes:
        only = sorted(set(classes) ^ set(val_classes))
        raise UserError(
            f"{train_root} and {val_root} hold different classes: only one of them has {', '.join(only[:10])}"
            + (f" and {len(only) - 10} more" if len(only) > 10 else ""),
            "Both need the same class folders.",
        )
    return (
        scan(train_root, classes, size, seed, resized_crop, follow_links),
        scan(val_root, classes, size, seed, False, follow_links),
    )


def load_undivided(root: Path, size: int, seed: int, resized_crop: bool, follow_links: bool = False) -> FolderSet:
    """The set without a validation part: `root/train` where there is no `root/val`, or class folders right in `root`.

    A `root/test` beside `root/train` stays for the end, and a note says so.

    Raises:
        UserError: where there is a `root/val`, and for whatever `load_folders` refuses.
    """
    if not _is_folder(root):
        raise UserError(f"there is no folder {root}", "Name the folder of the classes with --data-dir DIR.")
    parts = [name for name in ("train", "val", "test") if _holds_folders(root / name)]
    if "train" in parts and "val" in parts:
        raise UserError(
            f"--val-fraction: {root / 'val'} is there to validate on already",
            "Leave the flag out, or move the images of val/ into train/.",
        )
    folder = root / "train" if "train" in parts else root
    notes = (f"note: {root / 'test'} is left for the end",) if "test" in parts and folder != root else ()
    found = scan(folder, class_names(folder), size, seed, resized_crop, follow_links)
    return replace(found, notes=notes)


def part_of(root: Path) -> Path:
    """Where the class folders to evaluate on are: `root/val`, `root/test`, or `root` itself where it has no parts."""
    parts = [root / name for name in ("val", "test", "train") if _holds_folders(root / name)]
    return parts[0] if parts else root


def _holds_folders(folder: Path) -> bool:
    """True for a folder with others in it, as that of a part has them, and a class called `train` mostly not."""
    if not _is_folder(folder):
        return False
    with _readable(folder):
        return any(entry.is_dir() and not _is_hidden(entry.name) for entry in list(os.scandir(folder)))


def _is_folder(path: Path) -> bool:
    """Raises UserError where the way there is closed to this user: it may be one."""
    with _readable(path):
        return path.is_dir()


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def class_names(folder: Path) -> tuple[str, ...]:
    """The class folders right below a folder, sorted. Raises UserError where there is none."""
    with _readable(folder):
        entries = sorted((entry for entry in os.scandir(folder) if not _is_hidden(entry.name)), key=lambda e: e.name)
        names = [entry.name for entry in entries if entry.is_dir()]
    for entry in entries:
        if entry.is_symlink() and not Path(entry.path).exists():
            raise UserError(
                f"{entry.path} is a link to nothing, and may have been a class",
                "Mount or bring back what it pointed to, or remove the link.",
            )
    if not names:
        raise UserError(f"{folder} holds no class folders", _LAYOUT)
    return tuple(names)


def scan(
    root: Path, classes: tuple[str, ...], size: int, seed: int, resized_crop: bool, follow_links: bool
) -> FolderSet:
    """The images of these class folders, in the order of classes and paths, whatever order the disk lists them in."""
    found: list[bytes] = []
    labels: list[int] = []
    inside = "" if follow_links else os.path.realpath(root)
    others = Counter(filter(None, map(_beside_classes, os.scandir(root))))
    for label, name in enumerate(classes):
        _require_inside(root / name, inside)
        files = sorted(_images(root / name, "", inside, (), others))
        if not files:
            raise UserError(
                f"the class folder {root / name} holds no image",
                f"Put images there ({', '.join(EXTENSIONS)}), or remove the folder from every split.",
            )
        found += [os.fsencode(f"{name}/{file}") for file in files]
        labels += [label] * len(files)
    paths, ends = joined(found)
    left_out = ", ".join(f"{count:,} {kind}" for kind, count in others.most_common(5))
    left_out += f" and {len(others) - 5} more kinds" if len(others) > 5 else ""
    array = np.array(labels, np.int64)
    return FolderSet(root, classes, size, seed, resized_crop, paths, ends, array, left_out=left_out)


def _beside_classes(entry: os.DirEntry[str]) -> str:
    """What to call an entry beside the class folders that is left out, where somebody might miss it."""
    if entry.is_dir():
        return f"folder {entry.name}" if _is_hidden(entry.name) else ""
    return f"{Path(entry.name).suffix.lower()} beside the classes" if _is_image(entry.name) else ""


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not _is_hidden(name)


def image_files(folder: Path, follow_links: bool = False) -> list[str]:
    """Paths of the image files below a folder, relative to it, sorted.

    Raises:
        UserError: for a link out of it (unless `follow_links`), and what is no readable image file or folder.
    """
    return sorted(_images(folder, "", "" if follow_links else os.path.realpath(folder), (), Counter()))


def _images(folder: Path, prefix: str, inside: str, above: tuple[str, ...], others: Counter[str]) -> Iterator[str]:
    """Paths of the image files below a folder, relative to the first one. Entries that are no links cost no call.

    `inside`: the real path that links may not leave, if any; `above`: those of the folders on the way here. `others`:
    counts what is left out, by its ending.
    """
    here = os.path.realpath(folder)
    if here in above:
        raise UserError(f"{folder} is a link to a folder above it", "Remove the link: it has no end.")
    with _readable(folder):
        entries = list(os.scandir(folder))
    for entry in entries:
        path = Path(entry.path)
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
            raise UserError(f"{path} is {what}", "Replace or remove it.")
        elif entry.name not in _OF_THE_DESKTOP:
            others["hidden" if _is_hidden(entry.name) else path.suffix.lower() or "without an ending"] += 1


def _require_inside(path: Path, inside: str) -> None:
    if inside and path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
        raise UserError(
            f"{path} is a link to {os.path.realpath(path)}, outside of {inside}",
            "Give --follow-links if it is yours and meant, or put the file itself there.",
        )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}", "Remove it, or give this user the right.") from error
