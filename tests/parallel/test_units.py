"""How a model comes apart into the blocks that FSDP gathers one by one."""

import pytest
import torch
from torch import nn

from lockstep import models
from lockstep.parallel.fsdp import units


@pytest.mark.parametrize(
    ("name", "size", "kind", "count"),
    [
        ("resnet18", 64, "BasicBlock", 8),
        ("vit_b_16", 224, "EncoderBlock", 12),
        ("mobilenet_v3_small", 64, "InvertedResidual", 11),
        ("vgg11", 32, "Linear", 2),  # 25088 x 4096 and 4096 x 4096; convolutions up to 2.4 million have one too
    ],
)
def test_the_blocks_of_a_model_are_its_units(name: str, size: int, kind: str, count: int) -> None:
    with torch.device("meta"):
        model = models.build(name, in_channels=3, num_classes=10, image_size=size)
    kinds = [type(unit).__name__ for unit in units(model)]
    assert kinds.count(kind) == count
    inside = {id(child) for unit in units(model) for child in unit.modules() if child is not unit}
    assert not inside & {id(unit) for unit in units(model)}


def test_a_module_without_blocks_has_no_units() -> None:
    assert units(nn.Linear(3, 3)) == []
