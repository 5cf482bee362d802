"""Sets with the statistics and the resizing that a config gives, instead of their own."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from lockstep.config import DataConfig
from lockstep.data.arrays import ImageSet
from lockstep.errors import UserError


def as_given(data: DataConfig, sets: tuple[ImageSet, ImageSet]) -> tuple[ImageSet, ImageSet]:
    """The sets with the config's statistics, crop and interpolation, as far as it has some.

    Raises:
        UserError: for statistics of other channels than the images have, and a set that keeps to its own.
    """
    changed: dict[str, Any] = {}
    if data.mean:
        channels = sets[0].shape[0]
        mean, std = data.mean, data.std
        if channels == 1 and len(mean) > 1:  # of grey pictures, which weights for colours see as three like planes
            mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
        if len(mean) != channels:
            raise UserError(
                f"--mean is for {len(mean)} channels, and {sets[0].name} has {channels}",
                "Give --mean and --std for them.",
            )
        changed |= {"mean": mean, "std": std}
    if data.crop_pct:
        changed["crop_pct"] = data.crop_pct
    if data.interpolation != "auto":
        changed["interpolation"] = data.interpolation
    return _with(sets[0], changed), _with(sets[1], changed)


def _with(images: Any, changed: dict[str, Any]) -> Any:
    """A set with other values of the fields that it has."""
    if changed and not is_dataclass(images):
        raise UserError(f"{images.name} has statistics of its own, which nothing can replace", "Leave --mean out.")
    known = {item.name for item in fields(images)} if changed else set()
    return replace(images, **{name: value for name, value in changed.items() if name in known})
