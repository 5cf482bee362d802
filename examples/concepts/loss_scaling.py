"""Gradients in float16: how many become zero, and how many infinite, as the loss is scaled.

python examples/concepts/loss_scaling.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import lockstep as ls


def main() -> None:
    torch.manual_seed(0)
    train, _ = ls.loaders("digits", ls.World.single(), batch_size=64)
    body, head = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.GELU()), nn.Linear(256, 10)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=3e-3)
    for epoch in train.epochs(12):
        for batch in epoch:
            optimizer.zero_grad()
            hidden = body(batch.images)
            hidden.retain_grad()  # what backward hands from layer to layer: the smallest numbers of a step
            F.cross_entropy(head(hidden), batch.labels).backward()
            optimizer.step()
    gradients = hidden.grad
    for power in (0, 4, 8, 16, 30):
        half = (gradients * 2.0**power).half()
        zero, infinite = half.eq(0).float().mean(), half.isinf().float().mean()
        print(f"scale 2^{power:<3} zero {zero:>4.0%}   infinite {infinite:>4.0%}")


if __name__ == "__main__":
    main()
