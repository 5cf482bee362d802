"""Lockstep: train PyTorch image classifiers on one process or many; only the speed depends on how many.

The names below are the public library. They are imported on first use, so that `import lockstep` costs no import of
torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "lockstep.config",
    "UserError": "lockstep.errors",
    "WorkerFailed": "lockstep.distributed.failures",
    "World": "lockstep.distributed.world",
    "Order": "lockstep.data.order",
    "Batch": "lockstep.data.loaders",
    "TrainStep": "lockstep.training.step",
    "Metrics": "lockstep.training.evaluation",
    "Checkpoints": "lockstep.checkpoint.restore",
    "Classifier": "lockstep.inference.classifier",
    "evaluate": "lockstep.training.evaluation",
    "launch": "lockstep.distributed.launcher",
    "load": "lockstep.inference.loading",
    "loaders": "lockstep.training.assemble",
    "parallelize": "lockstep.parallel.strategy",
    "recipe": "lockstep.config.recipes",
    "train": "lockstep.training.loop",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:
    from lockstep.checkpoint.restore import Checkpoints as Checkpoints
    from lockstep.config import Config as Config
    from lockstep.config.recipes import recipe as recipe
    from lockstep.data.loaders import Batch as Batch
    from lockstep.data.order import Order as Order
    from lockstep.distributed.failures import WorkerFailed as WorkerFailed
    from lockstep.distributed.launcher import launch as launch
    from lockstep.distributed.world import World as World
    from lockstep.errors import UserError as UserError
    from lockstep.inference.classifier import Classifier as Classifier
    from lockstep.inference.loading import load as load
    from lockstep.parallel.strategy import parallelize as parallelize
    from lockstep.training.assemble import loaders as loaders
    from lockstep.training.evaluation import Metrics as Metrics
    from lockstep.training.evaluation import evaluate as evaluate
    from lockstep.training.loop import train as train
    from lockstep.training.step import TrainStep as TrainStep


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    if sys.platform == "win32":
        from lockstep.errors import NOT_ON_WINDOWS

        raise ImportError(f"lockstep.{name}: {NOT_ON_WINDOWS}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
