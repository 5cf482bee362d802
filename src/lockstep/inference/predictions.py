"""Pictures through a classifier on all ranks, whole chunks on each, as evaluation goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.data.loaders import EvalLoader
from lockstep.data.readers import reader
from lockstep.inference.classifier import Classifier, Prediction, likeliest
from lockstep.inference.pictures import BROKEN, Pictures
from lockstep.processes.world import World
from lockstep.training.evaluation import outputs


@dataclass(frozen=True)
class Answer:
    """A picture's path and what is on it, or why it could not be read."""

    path: str
    prediction: Prediction
    error: str = ""


def predictions(
    classifier: Classifier,
    paths: Sequence[str],
    world: World,
    top: int = 5,
    workers: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """What is on each picture, in their order, on all ranks; bit by bit the same on any number of them.

    Pictures go in chunks of the size that the run's evaluation had, whole chunks on a rank: the same files in the same
    order have the probabilities that evaluation saw.

    Args:
        top: classes to name for a picture.
        workers: processes that read pictures, for each rank.
        tick: called before each chunk of this rank.
    """
    card = classifier.card
    pictures = Pictures(tuple(paths), card)
    read = reader(pictures, world.device, "streaming", workers)
    loader = EvalLoader(pictures, classifier.prepare, world, read, card.eval_batch_size)
    top = min(top, len(card.classes))
    values = torch.zeros(len(paths), top, device=world.device)
    indices = torch.zeros(len(paths), top, dtype=torch.int64, device=world.device)
    states = torch.zeros(len(paths), dtype=torch.int64, device=world.device)
    for chunk, logits, state in outputs(classifier.model, loader, world, card.precision, tick, card.tta, (), True):
        rows = slice(chunk * card.eval_batch_size, chunk * card.eval_batch_size + len(logits))
        values[rows], indices[rows] = likeliest(logits, top, card.outputs)
        states[rows] = state
    summed: list[Tensor] = [world.sum(table).cpu() for table in (values, indices, states)]  # the others hold zeros
    answers = []
    for sample, (probabilities, classes, state) in enumerate(zip(*map(Tensor.tolist, summed), strict=True)):
        if state == BROKEN:
            answers.append(Answer(paths[sample], Prediction((), ()), pictures.fault(sample)))
        else:
            answers.append(Answer(paths[sample], classifier.named(classes, probabilities)))
    return answers
