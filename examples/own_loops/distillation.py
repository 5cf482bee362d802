"""A student that learns from a teacher.

python examples/own_loops/distillation.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep as ls


class Distilled(nn.Module):
    """In training the logits of student and teacher, in evaluation the student's alone."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def train(self, mode: bool = True) -> "Distilled":
        super().train(mode)
        self.teacher.eval()  # its dropout stays off, its batch norm as it is
        return self

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        logits = self.student(images)
        return (logits, self.teacher(images)) if self.training else logits


def distillation(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Hinton et al., arXiv:1503.02531: half the labels, half the teacher's softened answers."""
    student, teacher = outputs
    soft = F.kl_div((student / 4).log_softmax(1), (teacher / 4).log_softmax(1), log_target=True, reduction="batchmean")
    return 0.5 * F.cross_entropy(student, labels) + 0.5 * 16 * soft


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))


def trained(module: nn.Module, loss: Any, world: ls.World, train: Any) -> nn.Module:
    model = ls.parallelize(module.to(world.device).train(), world)
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = ls.TrainStep(model, loss, torch.optim.AdamW(parameters, lr=5e-3))
    for epoch in train.epochs(3):
        for batch in epoch:
            step(batch)
    return model


def main(world: ls.World) -> list[float]:
    train, val = ls.loaders("digits", world, batch_size=64)
    torch.manual_seed(0)
    teacher, student = net(256), net(16)
    losses = [ls.evaluate(trained(teacher, F.cross_entropy, world, train), val, world).loss]
    both = trained(Distilled(student, teacher), distillation, world, train)
    losses.append(ls.evaluate(both, val, world).loss)
    world.print(f"teacher {losses[0]:.4f}, student {losses[1]:.4f}")
    return losses


if __name__ == "__main__":
    ls.launch(main)
