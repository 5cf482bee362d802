"""How a model comes apart: units for FSDP, and stages of even size for several devices."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep import models
from lockstep.errors import UserError
from lockstep.parallel.fsdp import sequence, units
from lockstep.parallel.model_parallel import balanced, cut

CPU, META = torch.device("cpu"), torch.device("meta")


def built(name: str, size: int = 32) -> nn.Module:
    return models.build(name, in_channels=3, num_classes=10, image_size=size)


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
        model = built(name, size)
    kinds = [type(unit).__name__ for unit in units(model)]
    assert kinds.count(kind) == count
    inside = {id(child) for unit in units(model) for child in unit.modules() if child is not unit}
    assert not inside & {id(unit) for unit in units(model)}


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t", "convnext_tiny", "densenet121"])
def test_a_sequence_holds_each_layer_once(name: str) -> None:
    with torch.device("meta"):
        model = built(name, 224)
    layers = [id(m) for part in sequence(model) for m in part.modules() if next(m.children(), None) is None]
    assert len(layers) == len(set(layers))
    assert set(layers) == {id(m) for m in model.modules() if next(m.children(), None) is None}


def test_a_module_without_blocks_is_one_part() -> None:
    model = nn.Linear(3, 3)
    assert units(model) == []
    assert sequence(model) == [model]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_smaller_largest_run(sizes: list[int], data: st.DataObject) -> None:
    runs = data.draw(st.integers(1, len(sizes)))

    def largest(ends: list[int]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *ends]))

    ends = balanced(sizes, runs)
    assert len(ends) == runs
    assert ends[-1] == len(sizes)
    assert all(a < b for a, b in itertools.pairwise([0, *ends]))
    every = itertools.combinations(range(1, len(sizes)), runs - 1)
    assert largest(ends) == min(largest([*inner, len(sizes)]) for inner in every)


class Backwards(nn.Module):
    """Registers its layers in another order than it uses them, and adds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(8, 3))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.shift = nn.Parameter(torch.ones(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_stages_follow_the_order_of_use_and_the_output_comes_back() -> None:
    model, images = Backwards(), torch.randn(4, 1, 2, 4)
    expected = model(images)
    stages = cut(model, [CPU, CPU], images[:1], 4)
    assert [len(stage) > 0 for stage in stages] == [True, True]
    order = [part for stage in stages for part in stage]
    linears = [part for part in order if isinstance(part, nn.Linear)]
    assert linears == [*(block[0] for block in model.blocks), model.last[0]]
    assert torch.equal(model(images), expected)
    model(images).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "unused" not in name)


def test_each_stage_is_on_its_device_and_inputs_come_after_it() -> None:
    model = Backwards()
    first, second = cut(model, [CPU, META], torch.randn(1, 1, 2, 4), 4)
    assert {p.device for part in first for p in part.parameters()} == {CPU}
    assert {p.device for part in second for p in part.parameters()} == {META}
    assert model.shift.device == CPU
    assert model.unused.weight.device == CPU
    seen: list[Any] = []
    model.register_forward_hook(lambda module, args, output: seen.append(output), prepend=True)
    with pytest.raises(NotImplementedError, match="meta"):  # whose values can't come back
        model(torch.randn(4, 1, 2, 4))
    assert seen[0].device == META


def test_a_dry_run_leaves_no_statistics_behind() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(2, 3, 5, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[1].eval()
    cut(model, [CPU], torch.randn(1, 3, 5, 5), 8)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True]


def test_more_stages_than_parts_are_refused() -> None:
    with pytest.raises(UserError, match=r"--model-parallel 3: Sequential can be cut into 2 part\(s\) at most"):
        cut(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [CPU] * 3, torch.randn(1, 2), 4)
