"""The memory of a training step: parameters, gradients, optimizer's state, activations, counted without computing.

    python examples/concepts/memory.py

Fake tensors have shapes and no numbers, so a GPU's worth of memory is counted on any machine in seconds.
"""

from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torchvision.models import resnet50, vit_l_16
from torchvision.models.resnet import Bottleneck
from torchvision.models.vision_transformer import EncoderBlock

BATCH = 32
GIB = 2**30


@dataclass
class Kept:
    """Bytes that autograd keeps for the backward pass."""

    all: int = 0
    of_blocks: int = 0  # inside blocks, from their input to their output
    largest_block: int = 0
    inputs_of_blocks: int = 0

    @property
    def recomputed(self) -> int:
        """With activation checkpointing: blocks' inputs, one block's insides, and what is in no block."""
        return self.all - self.of_blocks + self.inputs_of_blocks + self.largest_block


def kept(model: nn.Module, block: type[nn.Module]) -> Kept:
    """Count each storage once, parameters not at all."""
    found, known, inside = Kept(), {p.untyped_storage()._cdata for p in model.parameters()}, [0]
    held = []  # so that no storage's address is given out twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            held.append(storage)
            found.all += storage.nbytes()
            inside[0] += storage.nbytes()
        return tensor

    def enters(_: nn.Module, inputs: tuple[Tensor]) -> None:
        found.inputs_of_blocks += inputs[0].nbytes
        inside[0] = 0

    def leaves(*_: object) -> None:
        found.of_blocks += inside[0]
        found.largest_block = max(found.largest_block, inside[0])

    for module in model.modules():
        if isinstance(module, block):
            module.register_forward_pre_hook(enters)
            module.register_forward_hook(leaves)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.empty(BATCH, 3, 224, 224))
    return found


def table(name: str, make: type[nn.Module], block: type[nn.Module], states: int) -> None:
    """Print a model's rows in GiB; `states`: numbers an optimizer keeps for a parameter."""
    # weights are drawn until they fit, which a tensor without numbers never does
    with FakeTensorMode(), patch.object(nn.init, "trunc_normal_"):
        model = make()
        full = kept(model, block)
        with torch.autocast("cpu", torch.bfloat16):
            half = kept(make(), block)
    weights = sum(p.nbytes for p in model.parameters())
    block_in_bf16 = max(sum(p.nbytes for p in m.parameters()) for m in model.modules() if isinstance(m, block)) / 2
    print(f"{name}, {weights // 4:,} parameters, a batch of {BATCH}")
    print(f"{'GiB':<18}{'parameters':>10}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'in all':>8}")
    for what, parts, gathered, activations in (
        ("float32", 1, 0, full.all),
        ("bf16", 1, 0, half.all),
        ("bf16, recomputed", 1, 0, half.recomputed),
        ("the same, FSDP 8", 8, block_in_bf16, half.recomputed),
    ):
        row = [weights / parts + gathered, weights / parts, states * weights / parts, activations]
        a, b, c, d, total = (number / GIB for number in (*row, sum(row)))
        print(f"{what:<18}{a:>10.2f}{b:>11.2f}{c:>11.2f}{d:>13.2f}{total:>8.2f}")


if __name__ == "__main__":
    table("ResNet-50, SGD with momentum", resnet50, Bottleneck, 1)
    table("ViT-L/16, AdamW", vit_l_16, EncoderBlock, 2)
