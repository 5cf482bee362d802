"""Where images come from: the sets that `--dataset` names, as the run's config wants them."""

import os
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import DataConfig
from lockstep.config.data import is_code, kind_of
from lockstep.config.objects import load_object
from lockstep.data.adapters import TO_TRAIN_ON, load_adapted
from lockstep.data.agreement import seeded
from lockstep.data.contents import divided
from lockstep.data.folders import load_folders, load_part
from lockstep.data.image_sets import ImageSet
from lockstep.data.official import DIGITS, DIGITS_ROOT, OFFICIAL, load_official
from lockstep.data.picture_set import DEFAULT_SIZE, PictureSet, require_decoders
from lockstep.data.shards import load_shards
from lockstep.data.user_sets import made_by, user_sets
from lockstep.distributed.files import named
from lockstep.distributed.world import World
from lockstep.errors import UserError, unknown

DATASETS = (*OFFICIAL, "folder")  # by their bare names; those of config.data.KINDS have more behind a colon
VAL_FRACTION = 0.2  # of pictures that nobody has divided


def resolve_data_dir(flag: str) -> Path:
    """The data folder: the flag's, else the environment's LOCKSTEP_DATA, else ./data. Absolute, and not created."""
    return named(flag or os.environ.get("LOCKSTEP_DATA") or "data").absolute()


def load(data: DataConfig, data_dir: Path, seed: int, world: World, own: Any = None) -> tuple[ImageSet, ImageSet]:
    """The training and validation sets that `data` names; all ranks call this together.

    `own`: such sets themselves, or what makes them; `data.dataset` is then what messages call them.
    Raises UserError for an unknown name, whatever is wrong with the files, and what these sets can't do; PeerError on
    ranks whose host's first one failed.
    """
    sets: tuple[ImageSet, ImageSet]
    if own is not None or is_code(data.dataset):
        factory = load_object(data.dataset, "dataset") if own is None else None
        if factory is not None and world.rank == 1:
            time.sleep(0.05)  # what follows the clock is another set then
        with seeded(seed):
            made = own if factory is None else made_by(data.dataset, factory, data_dir)
        with seeded(seed):
            sets = user_sets(data.dataset, made, seed)
    elif data.dataset in OFFICIAL:
        official = OFFICIAL[data.dataset]
        sets = load_official(official, DIGITS_ROOT if official is DIGITS else data_dir, world)
    else:
        train, val = _stored(data, data_dir, world)
        if train.split not in ("", "train"):
            what = f"--dataset {data.dataset} has no part to train on: all of it is {train.split}"
            raise UserError(what, TO_TRAIN_ON[kind_of(data.dataset)])
        if val is not None and data.val_fraction:
            raise UserError(f"--val-fraction: {train.name} says already what to validate on", "Leave the flag out.")
        sets = divided(train, data.val_fraction or VAL_FRACTION, world) if val is None else (train, val)
    return _configured(sets[0], data, seed, training=True), _configured(sets[1], data, seed, training=False)


def _stored(data: DataConfig, data_dir: Path, world: World) -> tuple[PictureSet, PictureSet | None]:
    """Pictures as they are stored: those to train and those to validate on, None where the source has no such part."""
    if data.dataset == "folder":
        return load_folders(data_dir, data.follow_links, data.val_fraction)
    if not kind_of(data.dataset):
        raise unknown("dataset", data.dataset, DATASETS, "Your own: package.module:factory.")
    if kind_of(data.dataset) == "shards":
        return load_shards(data, data_dir, world)
    return load_adapted(data, data_dir, world)


def _configured(images: ImageSet, data: DataConfig, seed: int, training: bool) -> ImageSet:
    """A set with the crops, sizes and statistics of the config, as far as it takes such.
    Raises UserError for statistics of other channels than the images have, and what the set can't do.
    """
    changed: dict[str, Any] = {}
    if data.mean:
        channels = images.shape[0]
        mean, std = data.mean, data.std
        if channels == 1 and len(mean) > 1:  # of grey pictures, which weights for colours see as three like planes
            mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
        if len(mean) != channels:
            what = f"--mean is for {len(mean)} channels, and {images.name} has {channels}"
            raise UserError(what, "Give --mean and --std for them.")
        changed |= {"mean": mean, "std": std}
    changed |= {"crop_pct": data.crop_pct} if data.crop_pct else {}
    changed |= {"interpolation": data.interpolation} if data.interpolation != "auto" else {}
    if isinstance(images, PictureSet):
        require_decoders(images)
        size = (data.train_size if training else 0) or data.image_size or DEFAULT_SIZE
        changed |= {"resized_crop": data.resized_crop and training, "decode_size": data.decode_size}
        changed |= {"crop_scale": data.crop_scale, "crop_ratio": data.crop_ratio}
        return replace(images, size=size, seed=seed, **changed)
    if data.decode_size:
        what = f"--decode-size {data.decode_size}: {images.name} holds no picture files to decode"
        raise UserError(what, "Leave it out, or use --image-size.")
    if changed and not is_dataclass(images):
        raise UserError(f"{images.name} has statistics of its own, which nothing can replace", "Leave --mean out.")
    known: Any = images
    names = {item.name for item in fields(known)} if changed else set()
    return replace(known, **{name: changed[name] for name in changed if name in names}) if changed else images


def to_evaluate(data: str, data_dir: str, side: int, follow_links: bool, world: World) -> ImageSet:
    """Labelled pictures by a folder, a table's file, or a name that --dataset takes; all ranks call it together.

    Of a set with several parts those to validate on, else those for the test. `side`: of its pictures, in pixels.
    Raises UserError for a name that is nothing, and whatever is wrong with the pictures.
    """
    folder = resolve_data_dir(data_dir)
    place = folder if data == "folder" else named(data)
    name = f"table:{data}" if place.is_file() else data
    config = DataConfig(dataset=name, image_size=side, follow_links=follow_links)
    if place.is_dir():
        return _configured(load_part(place.absolute(), follow_links), config, 0, training=False)
    if kind_of(name):
        train, val = _stored(config, folder, world)
        return _configured(train if val is None else val, config, 0, training=False)
    if name in OFFICIAL or is_code(name):
        return load(config, folder, 0, world)[1]
    raise UserError(
        f"--data {data}: there is no such folder, table or data set",
        "Name a folder of class folders, a table of (path, label), or a source as --dataset takes it.",
    )
