"""Step 2: one process, several GPUs: nn.DataParallel.

    python 02-data-parallel.py --parts 4
    python 02-data-parallel.py --parts 4 --wrong    the loss is taken inside of forward, then averaged over the GPUs

On a CPU a batch is cut as it would be for so many GPUs.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import digits

BATCH, EPOCHS = 64, 3
torch.set_default_dtype(torch.float64)  # so that differences in the printed digits are not rounding


def evaluate(model: nn.Module, test: TensorDataset, device: torch.device) -> str:
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=256):
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
    model.train()
    return f"test loss {loss / len(test):.6f}, accuracy {correct / len(test):.4%}"


class WithLoss(nn.Module):
    """The wrong way: the loss is taken on each GPU, so that GPU 0 need not hold all outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels).reshape(1)


def parallel(module: nn.Module, parts: int, *inputs: Tensor) -> Tensor:
    """DataParallel, on GPUs. On a CPU that would just call the module: so cut the batch as it would, and join."""
    if torch.cuda.is_available():
        return nn.DataParallel(module, device_ids=list(range(parts)))(*inputs)
    pieces = zip(*(tensor.chunk(parts) for tensor in inputs), strict=True)
    return torch.cat([module(*piece) for piece in pieces])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--parts", type=int, default=max(1, torch.cuda.device_count()), help="GPUs, or parts on a CPU")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, test = digits.load()
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            if args.wrong:
                loss = parallel(WithLoss(model), args.parts, images, labels).mean()  # a mean of means
            else:
                loss = F.cross_entropy(parallel(model, args.parts, images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {evaluate(model, test, device)}")
    print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.8f}")


if __name__ == "__main__":
    main()
