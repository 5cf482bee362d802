"""Files that run code when anything unpickles them."""

import io
import os
import pickle
import random
from pathlib import Path
from typing import Any

import torch


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def pickled(rng: random.Random, sentinel: Path) -> bytes:
    """A file that makes the sentinel when anything unpickles it, of any kind that torch ever wrote."""
    bomb, file = _Bomb(str(sentinel)), io.BytesIO()
    match rng.randrange(4):
        case 0:
            return pickle.dumps(bomb, protocol=rng.randrange(6))
        case 1:
            torch.save({"model": bomb}, file)
        case 2:
            torch.save(bomb, file, _use_new_zipfile_serialization=False)
        case 3:
            return pickle.dumps({"state": bomb, "param_groups": []})
    return file.getvalue()
