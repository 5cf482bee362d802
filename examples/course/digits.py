"""The data of the course: 1,797 handwritten digits, 8x8 pixels, which come with Lockstep. No network is needed."""

from importlib.resources import files

import torch
from torch.utils.data import TensorDataset


def load() -> tuple[TensorDataset, TensorDataset]:
    """1,437 samples to train on and 360 to test on. A sample: image, float [64], about -1 to 2, and label, 0 to 9."""
    return _read("train.bin"), _read("test.bin")


def _read(name: str) -> TensorDataset:
    data = bytearray((files("lockstep.data") / "digits" / name).read_bytes())
    records = torch.frombuffer(data, dtype=torch.uint8).view(-1, 65)  # one byte of label, 64 of pixels
    images = records[:, 1:].to(torch.get_default_dtype()) / 255
    return TensorDataset((images - 0.3058) / 0.3761, records[:, 0].long())
