"""A run's most confident mistakes: its weights over its own evaluation set, and the pictures that they get wrong."""

import io
from collections import Counter
from pathlib import Path

import numpy as np

from lockstep.data.image_sets import ImageSet, file_of, label_name, label_sets
from lockstep.data.official import DIGITS, OFFICIAL
from lockstep.data.sources import resolve_data_dir
from lockstep.distributed.world import World
from lockstep.errors import UserError
from lockstep.inference.classifier import likeliest
from lockstep.inference.mistakes import Mistake, Mistakes
from lockstep.inference.pictures import as_image
from lockstep.training.evaluation import outputs
from lockstep.training.run_folder import read_config, to_evaluate

_SIDE = 128  # pixels of a picture's longer side at most: a few KB each
_PAIRS = 15


def find_mistakes(world: World, folder: str, data_dir: str, trust_code: bool, most: int) -> Mistakes:
    """Evaluate a run's weights again, in one process. Nothing is downloaded.

    Args:
        data_dir: where the data lies; empty: where the config or the environment says.
        most: mistakes to show.

    Raises:
        UserError: where weights or data are missing, are not each other's, or need code that nobody allowed.
    """
    config = read_config(folder, trust_code)
    config = config.with_execution(data_dir=data_dir or config.execution.data_dir, cache="", workers=0)
    _require_there(config.data.dataset, config.execution.data_dir)
    name = next((n for n in ("best", "final") if (Path(folder) / "weights" / f"{n}.safetensors").is_file()), "")
    if not name:
        raise UserError(f"{folder} holds no weights: the run has not evaluated yet", "")
    model, train_set, loader = to_evaluate(world, config, folder, name)
    images, size, classes = loader.images, loader.batch_size, loader.images.classes
    confidence, taken = np.zeros(len(images), np.float32), np.zeros(len(images), np.int64)
    labels = np.zeros(len(images), np.int64)
    found = outputs(model, loader, world, config.precision, tta=config.tta, synchronized=True)
    for chunk, logits, truth in found:
        rows = slice(chunk * size, chunk * size + len(logits))
        values, indices = likeliest(logits, 1, "sigmoid" if config.optim.loss == "bce" else "softmax")
        confidence[rows], taken[rows] = values[:, 0].cpu().numpy(), indices[:, 0].cpu().numpy()
        labels[rows] = truth.cpu().numpy()
    sets = label_sets(images)
    if sets is None:
        wrong = np.flatnonzero(taken != labels)
    else:  # of several labels any is right; of none, a class that it is not sure of
        wrong = np.flatnonzero(~np.where(sets[labels].any(axis=1), sets[labels, taken], confidence < 0.5))
    pairs = Counter(zip(labels[wrong].tolist(), taken[wrong].tolist(), strict=True)).most_common(_PAIRS)
    chosen = wrong[np.argsort(-np.nan_to_num(confidence[wrong]), kind="stable")][:most]
    return Mistakes(
        weights=name,
        images=len(images),
        wrong=len(wrong),
        train_data=train_set.fingerprint,
        pairs=[(label_name(images, label), classes[other], n) for (label, other), n in pairs],
        shown=[
            Mistake(k, named, classes[taken[k]], float(confidence[k]), *_picture(images, k), file_of(images, k))
            for k, named in ((k, label_name(images, int(labels[k]))) for k in chosen.tolist())
        ],
    )


def _require_there(dataset: str, data_dir: str) -> None:
    """Raise UserError where a published set would have to be downloaded first."""
    found = OFFICIAL.get(dataset)
    if found is None or found is DIGITS:
        return
    folder = resolve_data_dir(data_dir) / found.folder
    if not all((folder / name).is_file() for name in found.files):
        raise UserError(f"{dataset} is not in {folder}", "Name the folder that it lies in with --data-dir.")


def _picture(images: ImageSet, sample: int) -> tuple[int, bytes]:
    """Width and file of a picture as evaluation reads it, before it is normalised."""
    pixels, _ = images.read(np.array([sample]), None)
    image = as_image(pixels[0])
    large = max(image.size) > _SIDE
    image.thumbnail((_SIDE, _SIDE))  # leaves smaller ones alone
    out = io.BytesIO()
    if large:
        image.save(out, "JPEG", quality=88)
    else:
        image.save(out, "PNG", optimize=True)
    return image.width, out.getvalue()
