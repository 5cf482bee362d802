"""Where images come from: the sets by name."""

import os
from pathlib import Path

from lockstep.config import DataConfig
from lockstep.config.objects import load_object
from lockstep.data.agreement import require_same, seeded
from lockstep.data.arrays import ImageSet
from lockstep.data.official import DIGITS, DIGITS_ROOT, OFFICIAL, load_official
from lockstep.data.user import user_sets
from lockstep.errors import unknown
from lockstep.processes.world import World

DATASETS = (*OFFICIAL, "folder")


def resolve_data_dir(flag: str) -> Path:
    """The data folder: the flag's, else the environment's LOCKSTEP_DATA, else ./data. Absolute, and not created."""
    return Path(flag or os.environ.get("LOCKSTEP_DATA") or "data").expanduser().absolute()


def load(data: DataConfig, data_dir: Path, seed: int, world: World) -> tuple[ImageSet, ImageSet]:
    """The training and validation sets that `data` names; all ranks call this together.

    Raises:
        UserError: for an unknown name, and whatever is wrong with the files (see official, folder and user).
        PeerError: on the waiting ranks, where a host's first rank failed.
    """
    if data.dataset in OFFICIAL:
        official = OFFICIAL[data.dataset]
        return load_official(official, DIGITS_ROOT if official is DIGITS else data_dir, world)
    if data.dataset == "folder":
        from lockstep.data.folder import DEFAULT_SIZE  # imports torchvision, 1.5 s
        from lockstep.data.layout import load_folders, load_undivided

        how = data_dir, data.image_size or DEFAULT_SIZE, seed, data.resized_crop, data.follow_links
        if data.val_fraction:
            from lockstep.data.division import divided

            return divided(load_undivided(*how), data.val_fraction, world)
        return load_folders(*how)
    if ":" in data.dataset:
        factory = load_object(data.dataset, "dataset")
        with seeded(seed):
            sets = user_sets(data.dataset, factory, data_dir)
        require_same(sets, seed, world)
        return sets
    raise unknown("dataset", data.dataset, DATASETS, "Your own: package.module:factory.")
