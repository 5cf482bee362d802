"""`--init pretrained`: published weights, the images that they want, and their file, fetched once a host."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from lockstep.checkpoint.foreign import load_adapted, read_foreign
from lockstep.config import Config
from lockstep.config.recipes import recipe
from lockstep.data.official import fetch, unreachable, verify
from lockstep.distributed.world import World
from lockstep.errors import UserError, reason
from lockstep.models.published_weights import ASKED, Weights, converted, find, tag_of


def asked(config: Config) -> bool:
    """True where a run begins with published weights, by --init pretrained[:TAG]."""
    return config.model.init.partition(":")[0] == ASKED


def weights_of(config: Config) -> Weights:
    """The published weights of a config that asks for some."""
    return find(config.model.model, config.model.init.partition(":")[2])


def settled(config: Config) -> Config:
    """The config with the weights' tag and the images that they were made with; as it is where nobody asked for some.

    A model's tag, as resnet18.a1_in1k, asks for them as --init pretrained does, unless --init names others. What the
    user has chosen stays: statistics, crop and interpolation that were given, and an --image-size other than the
    recipe's. A settled config stays as it is.
    """
    if not config.model.init and tag_of(config.model.model):
        config = replace(config, model=replace(config.model, init=ASKED))
    if not asked(config):
        return config
    found, data = weights_of(config), config.data
    usual = recipe(config.recipe).data.image_size
    return replace(
        config,
        model=replace(config.model, init=f"{ASKED}:{found.tag}"),
        data=replace(
            data,
            mean=data.mean or found.mean,
            std=data.std or found.std,
            image_size=found.size if data.image_size == usual else data.image_size,
            crop_pct=data.crop_pct or round(found.crop_pct, 9),
            interpolation=found.interpolation if data.interpolation == "auto" else data.interpolation,
        ),
    )


def origin(config: Config) -> str:
    """Whose weights a run of a settled config began with, and their licence, for who gets what it has learned."""
    init = config.model.init
    return str(weights_of(config)) if asked(config) else f"the file {Path(init).name}" if init else ""


def lines(config: Config) -> list[str]:
    """What the images have become for the weights' sake, for the start of a run."""
    data = config.data
    if not asked(config):
        return []
    mean, std = (" ".join(f"{each:.4g}" for each in values) for values in (data.mean, data.std))
    return [
        f"begun with {origin(config)}",
        f"images: {data.image_size} pixels a side, mean {mean}, std {std}; photos are resized by {data.interpolation}, "
        f"and evaluation keeps {data.crop_pct:.4g} of the short side",
    ]


def file_of(weights: Weights, world: World) -> Path:
    """The weights' file on this host: one that is there, or else the first rank of each host downloads it.

    The others wait for --collective-timeout at most.

    Raises:
        UserError: for a damaged file, and one that can't be had from here, saying what to put where.
        PeerError: on the waiting ranks, where a host's first rank failed.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    with world.first_on_host():
        for name in weights.files:
            if (folder / name).is_file():
                if weights.checksum and name == weights.files[0] and not weights.repository and world.local_rank == 0:
                    verify(folder / name, None, weights.checksum)
                return folder / name
        return _from_hub(weights, folder) if weights.repository else _from_url(weights, folder)


def _from_url(weights: Weights, folder: Path) -> Path:
    path = folder / weights.files[0]
    if failure := fetch(weights.url, path, weights.checksum):
        raise UserError(
            f"{weights.model}.{weights.tag}: no {path}, and not to be had from here ({failure})",
            f"On a machine with a network download {weights.url} and put it there, name a file by --init FILE, or "
            "begin with random weights by --init none.",
        )
    return path


def _from_hub(weights: Weights, folder: Path) -> Path:
    from huggingface_hub import constants, hf_hub_download

    failure = said = ""
    for here in (True, False):  # what an earlier run has left; then the hub, whose client tries long without network
        if not here:
            failure = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
        for name in () if failure else ("model.safetensors", "pytorch_model.bin"):
            try:
                path = Path(hf_hub_download(weights.repository, name, local_files_only=here))
            except Exception as error:  # of the network, of the hub, of the disk: it has many
                said = reason(error)
                continue
            if re.fullmatch("[0-9a-f]{64}", path.resolve().name):  # the hub's name for its content
                verify(path, None, path.resolve().name)
            return path
    place = folder / weights.files[0]
    raise UserError(
        f"{weights.model}.{weights.tag}: no {place}, and not to be had from here ({failure or said})",
        f"On a machine with a network download model.safetensors of {weights.repository} from the Hugging Face hub and "
        "put it there under that name, or name a file by --init FILE.",
    )


def begin(
    model: nn.Module, weights: Weights, path: Path, shape: tuple[int, int, int], say: Callable[[str], object]
) -> None:
    """Give a fresh model the published weights; a head for other classes stays as it was drawn. `shape`: [C, H, W]."""
    found = converted(weights, read_foreign(path), shape[0], shape[1])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    done = load_adapted(model, found, str(path), adapt=True)
    say(f"weights: {path.name}, SHA-256 {digest[:12]}...")
    head = [line for line in done if line.endswith("keeps its initial values")] or [
        f"the head is the weights' own, for as many classes ({weights.classes}) as the data has"
    ]
    for line in [*(line for line in done if line not in head), *head]:
        say(f"weights: {line}")
