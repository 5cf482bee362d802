"""Train the module of a case by plain PyTorch, without Lockstep: does it work at all?"""

import runpy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F


def train(file: Path) -> list[float]:
    """Losses of three steps on one process; what a loop of the user's own adds is left out."""
    space = runpy.run_path(str(file))
    torch.manual_seed(0)
    pictures, _ = space["make_data"]()
    if not isinstance(pictures, tuple):
        pictures = torch.stack([image for image, _ in pictures]), torch.tensor([label for _, label in pictures])
    model, loss = space["make_model"](), space.get("loss", F.cross_entropy)
    model(pictures[0][:10])  # parameters of lazy layers
    if "make_optimizer" in space:
        optimizer = space["make_optimizer"](model, None, 0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for start in (0, 10, 20):
        images, labels = (part[start : start + 10] for part in pictures)

        def closure(images: torch.Tensor = images, labels: torch.Tensor = labels) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = loss(model(images), labels).mean()
            value.backward()
            losses.append(value.item())
            return value

        closure()
        optimizer.step(closure if "Sam" in space or isinstance(optimizer, torch.optim.LBFGS) else None)
    return losses


if __name__ == "__main__":
    train(Path(sys.argv[1]))
