"""Where images come from: the sets by name."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config import DataConfig
from lockstep.config.objects import load_object
from lockstep.data.agreement import require_same, seeded
from lockstep.data.arrays import ArraySet, ImageSet
from lockstep.data.given import as_given
from lockstep.data.named import is_code, kind_of
from lockstep.data.official import DIGITS, DIGITS_ROOT, OFFICIAL, load_official
from lockstep.data.user import made_by, user_sets
from lockstep.errors import UserError, unknown
from lockstep.processes.files import named
from lockstep.processes.world import World

if TYPE_CHECKING:
    from lockstep.data.folder import FolderSet

DATASETS = (*OFFICIAL, "folder")  # by their bare names; those of named.KINDS have more behind a colon


def resolve_data_dir(flag: str) -> Path:
    """The data folder: the flag's, else the environment's LOCKSTEP_DATA, else ./data. Absolute, and not created."""
    return named(flag or os.environ.get("LOCKSTEP_DATA") or "data").absolute()


def load(data: DataConfig, data_dir: Path, seed: int, world: World, given: Any = None) -> tuple[ImageSet, ImageSet]:
    """The training and validation sets that `data` names; all ranks call this together.

    `given`: such sets themselves, in whose stead `data.dataset` is what messages call them.

    Raises:
        UserError: for an unknown name, whatever is wrong with the files (see official, folder and user), and what these
            sets can't do.
        PeerError: on the waiting ranks, where a host's first rank failed.
    """
    found = _named(data, data_dir, seed, world) if given is None else _agreed(data.dataset, given, seed, world)
    sets = as_given(data, found)
    _require_decoders(sets)
    if data.train_size:
        sets = _resized(sets[0], data.train_size), sets[1]
    if data.resized_crop:
        sets = _cropped(sets[0], data.crop_scale, data.crop_ratio), sets[1]
    return _shrunk(sets, data.decode_size) if data.decode_size else sets


def _cropped(images: ImageSet, scale: tuple[float, ...], ratio: tuple[float, ...]) -> ImageSet:
    """The set with random crops in these ranges, if it takes such."""
    from lockstep.data.folder import FolderSet  # imports torchvision, 1.5 s

    return replace(images, crop_scale=scale, crop_ratio=ratio) if isinstance(images, FolderSet) else images


def _require_decoders(sets: tuple[ImageSet, ImageSet]) -> None:
    if not all(isinstance(images, ArraySet) for images in sets):
        from lockstep.data.folder import FolderSet, require_decoders  # imports torchvision, 1.5 s

        for images in sets:
            if isinstance(images, FolderSet):
                require_decoders(images)


def _resized(images: ImageSet, size: int) -> ImageSet:
    """The set, its pictures cut to another side; others are resized as they are augmented."""
    from lockstep.data.folder import FolderSet  # imports torchvision, 1.5 s

    return replace(images, size=size) if isinstance(images, FolderSet) else images


def _shrunk(sets: tuple[ImageSet, ImageSet], decode_size: int) -> tuple[ImageSet, ImageSet]:
    """The sets, their pictures shrunk as they are read."""
    from lockstep.data.folder import FolderSet  # imports torchvision, 1.5 s

    train, val = sets
    if not (isinstance(train, FolderSet) and isinstance(val, FolderSet)):
        raise UserError(
            f"--decode-size {decode_size}: {train.name} holds no picture files to decode",
            "Leave it out, or use --image-size.",
        )
    return replace(train, decode_size=decode_size), replace(val, decode_size=decode_size)


def _named(data: DataConfig, data_dir: Path, seed: int, world: World) -> tuple[ImageSet, ImageSet]:
    if data.dataset in OFFICIAL:
        official = OFFICIAL[data.dataset]
        return load_official(official, DIGITS_ROOT if official is DIGITS else data_dir, world)
    if data.dataset == "folder" and not data.val_fraction:
        from lockstep.data.layout import load_folders

        return load_folders(data_dir, *_how(data, seed))
    if data.is_divisible:
        return _with_validation(data, data_dir, seed, world)
    if is_code(data.dataset):
        factory = load_object(data.dataset, "dataset")
        with seeded(seed):
            made = made_by(data.dataset, factory, data_dir)
        return _agreed(data.dataset, made, seed, world)
    raise unknown("dataset", data.dataset, DATASETS, "Your own: package.module:factory.")


def _agreed(name: str, made: Any, seed: int, world: World) -> tuple[ImageSet, ImageSet]:
    """A user's own sets, the same on all ranks."""
    with seeded(seed):
        sets = user_sets(name, made, seed)
    require_same(sets, seed, world)
    return sets


def _how(data: DataConfig, seed: int) -> tuple[int, int, bool, bool]:
    """How pictures are read: size, seed, random crops in training, and links that lead elsewhere."""
    from lockstep.data.folder import DEFAULT_SIZE  # imports torchvision, 1.5 s

    return data.image_size or DEFAULT_SIZE, seed, data.resized_crop, data.follow_links


def stored(data: DataConfig, data_dir: Path, seed: int, world: World) -> tuple["FolderSet", "FolderSet | None"]:
    """A source of pictures as they are stored: those to train and those to validate on, if it tells them apart."""
    how = _how(data, seed)
    if data.dataset == "folder":
        from lockstep.data.layout import load_undivided

        return load_undivided(data_dir, *how), None
    if kind_of(data.dataset) == "tv":
        from lockstep.data.vision import load_vision

        return load_vision(data.dataset, data_dir, *how[:3], world)
    if kind_of(data.dataset) == "hf":
        from lockstep.data.hub import load_hub

        return load_hub(data.dataset, data_dir, *how[:3], world)
    from lockstep.data.table import load_table

    return load_table(data.dataset, data_dir, *how)


def _with_validation(data: DataConfig, data_dir: Path, seed: int, world: World) -> tuple[ImageSet, ImageSet]:
    train, val = stored(data, data_dir, seed, world)
    if val is None and not data.val_fraction:
        raise UserError(
            f"{train.name} does not say what to validate on",
            "Give --val-fraction 0.1, which validates on a tenth of the images, chosen by what they hold.",
        )
    if val is not None and data.val_fraction:
        raise UserError(f"--val-fraction: {train.name} says already what to validate on", "Leave the flag out.")
    if val is not None:
        return train, val
    from lockstep.data.division import divided

    return divided(train, data.val_fraction, world)


def to_evaluate(data: str, data_dir: str, side: int, follow_links: bool, world: World) -> ImageSet:
    """Labelled pictures by a folder, a table's file, or a name that --dataset takes; all ranks call it together.

    Of a set with several parts those to validate on, else those for the test. `side`: of its pictures, in pixels.

    Raises:
        UserError: for a name that is nothing, and whatever is wrong with the pictures.
    """
    folder = resolve_data_dir(data_dir)
    place = folder if data == "folder" else Path(data).expanduser()
    name = f"table:{data}" if place.is_file() else data
    config = DataConfig(dataset=name, image_size=side, follow_links=follow_links)
    if place.is_dir():
        from lockstep.data.layout import class_names, part_of, scan

        part = part_of(place.absolute())
        return scan(part, class_names(part), side, 0, False, follow_links)
    if kind_of(name):
        train, val = stored(config, folder, 0, world)
        return val or train
    if name in OFFICIAL or is_code(name):
        return _named(config, folder, 0, world)[1]
    raise UserError(
        f"--data {data}: there is no such folder, table or data set",
        "Name a folder of class folders, a table of (path, label), or a source as --dataset takes it.",
    )
