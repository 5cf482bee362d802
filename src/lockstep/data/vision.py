"""torchvision's classification sets by name: `--dataset tv:Flowers102`."""

import hashlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.folder import joined
from lockstep.data.held import HeldSet, ListedSet, as_file, numbered
from lockstep.data.named import parse
from lockstep.errors import UserError, reason, unknown
from lockstep.processes.world import World

# What to train and to validate on, by the argument `split`; "": the set has one part, or an argument `train`
_SPLITS = {
    **dict.fromkeys(("Caltech101", "Caltech256", "EuroSAT", "SEMEION", "SUN397"), ("", "")),
    **dict.fromkeys(("FashionMNIST", "KMNIST", "MNIST", "QMNIST", "USPS"), ("", "")),
    **dict.fromkeys(("FER2013", "Food101", "GTSRB", "LFWPeople", "STL10", "SVHN", "StanfordCars"), ("train", "test")),
    **dict.fromkeys(("CLEVRClassification", "DTD", "FGVCAircraft", "Flowers102"), ("train", "val")),
    **dict.fromkeys(("Imagenette", "RenderedSST2"), ("train", "val")),
    "Country211": ("train", "valid"),
    "OxfordIIITPet": ("trainval", "test"),
    "Places365": ("train-standard", "val"),
}
_OURS = {"CIFAR10": "cifar10", "CIFAR100": "cifar100"}  # torchvision's come as pickles, which may run code
_LABELS = ("_labels", "targets", "labels", "y")
_FILES = ("_image_files", "_images", "data")
_PAIRS = ("_samples", "samples", "imgs")  # of a file, and a label
_PROBES = 3


def known_sets() -> list[str]:
    """The names that this torchvision has."""
    from torchvision import datasets

    return [name for name in _SPLITS if hasattr(datasets, name)]


def load_vision(
    dataset: str, data_dir: Path, size: int, seed: int, resized_crop: bool, world: World
) -> tuple[ListedSet, ListedSet | None]:
    """The parts to train and to validate on; None: the set has one part. All ranks call it together.

    The first process of each host downloads below the data folder, by torchvision's own checksums, while the others
    wait, as long as --collective-timeout at most.

    Raises:
        UserError: for a name that is none of a classification set, and where it can't be had.
        PeerError: on the waiting ranks, where a host's first rank failed.
    """
    name, given = parse(dataset, ("train", "val"))
    if name in _OURS:
        raise UserError(f"--dataset {dataset}: torchvision reads it by pickle", f"Use --dataset {_OURS[name]}.")
    if name not in (kinds := known_sets()):
        same = [kind for kind in kinds if kind.lower() == name.lower()]
        raise unknown("classification set of torchvision:", name, same or kinds)
    splits = given.get("train", _SPLITS[name][0]), given.get("val", _SPLITS[name][1])
    if given and not _SPLITS[name][0]:
        raise UserError(f"--dataset {dataset}: tv:{name} has no parts to choose from", "Leave train= and val= out.")
    with world.first_on_host(), _told(name, data_dir):
        made = _made(name, splits, data_dir, world.local_rank == 0)
    sets = [_as_set(f"tv:{name}", each, data_dir, size, seed, resized_crop) for each in made]
    if len(sets) == 1:
        return sets[0], None
    train, val = sets
    if train.classes != val.classes:
        raise UserError(
            f"tv:{name}: the classes of its parts differ", "Use it by a package.module:factory of your own."
        )
    notes = (f"tv:{name}: to train on its part {splits[0]}, to validate on {splits[1]}",) if splits[0] else ()
    return replace(train, notes=notes), replace(val, resized_crop=False)


def _made(name: str, splits: tuple[str, str], data_dir: Path, download: bool) -> list[Any]:
    """The set's parts as torchvision's objects."""
    from torchvision import datasets

    kind = getattr(datasets, name)
    takes = inspect.signature(kind.__init__).parameters
    how: dict[str, Any] = {"download": download} if "download" in takes or "kwargs" in takes else {}
    if splits[0]:
        return [kind(data_dir, split=part, **how) for part in splits]
    if "train" in takes:
        return [kind(data_dir, train=part, **how) for part in (True, False)]
    return [kind(data_dir, **how)]


@contextmanager
def _told(name: str, data_dir: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(f"tv:{name} needs {error.name or reason(error)}", f"pip install {error.name or ''}") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"tv:{name} is not in {data_dir} and can't be had from here, or is damaged: {reason(error)}",
            f"On a machine with a network run `python -c \"import torchvision; torchvision.datasets.{name}('DIR', "
            'download=True)"` and copy DIR here as --data-dir; what is damaged, remove first.',
        ) from error


def _as_set(name: str, made: Any, data_dir: Path, size: int, seed: int, resized_crop: bool) -> ListedSet:
    files, found = _listed(made)
    labels, classes = numbered(name, found, getattr(made, "classes", None) or getattr(made, "categories", None))
    _require_same(name, made, found)
    how: dict[str, Any] = {"classes": classes, "size": size, "seed": seed, "resized_crop": resized_crop, "called": name}
    if files is None:
        paths, ends = joined([str(row).encode() for row in range(len(labels))])
        held = np.asarray(made.data) if hasattr(made, "data") else np.empty(0)
        digest = hashlib.sha256(np.ascontiguousarray(held).tobytes()).hexdigest() if held.dtype != object else ""
        return HeldSet(
            root=data_dir, paths=paths, ends=ends, labels=labels, source=made, fetch=as_file, digest=digest, **how
        )
    inside = [os.path.relpath(file, data_dir) for file in files]
    entries = sorted(zip(labels.tolist(), inside, strict=True))  # some sets list their folders unsorted
    paths, ends = joined([os.fsencode(path) for _, path in entries])
    ordered = np.array([label for label, _ in entries], np.int64)
    return ListedSet(root=data_dir, paths=paths, ends=ends, labels=ordered, **how)


def _listed(made: Any) -> tuple[list[str] | None, Any]:
    """The set's files, where it lists them, and its labels."""
    count = len(made)

    def of(names: tuple[str, ...]) -> Any:
        held: list[Any] = [getattr(made, name, None) for name in names]
        return next((each for each in held if hasattr(each, "__len__") and len(each) == count and count), None)

    labels, files, pairs = of(_LABELS), of(_FILES), of(_PAIRS)
    if pairs is not None and isinstance(pairs[0], tuple | list) and len(pairs[0]) == 2:
        files = [pair[0] for pair in pairs]
        labels = [pair[1] for pair in pairs] if labels is None else labels
    if labels is None:
        labels = [made[row][1] for row in range(count)]  # reads every picture
    if files is None or not isinstance(files[0], str | os.PathLike):
        return None, labels
    return [os.fspath(file) for file in files], labels


def _require_same(name: str, made: Any, labels: Any) -> None:
    """Raise UserError where the set gives samples other labels than those that were found beside them."""
    for row in np.unique(np.linspace(0, len(made) - 1, _PROBES).astype(int)).tolist():
        image, label = made[row]
        if not hasattr(image, "convert") or label != labels[row]:
            raise UserError(
                f"{name}: its sample {row} is ({type(image).__name__}, {label}), not a picture of class {labels[row]}",
                "Use it by a package.module:factory of your own.",
            )
