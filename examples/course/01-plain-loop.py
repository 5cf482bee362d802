"""Step 1: a plain loop on one process.

    python 01-plain-loop.py
    python 01-plain-loop.py --wrong     the test loss as a mean of the batches' means

With --nproc-per-node of torchrun it is trained as often as there are processes: they know nothing of each other.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import digits

BATCH, EPOCHS = 64, 3
torch.set_default_dtype(torch.float64)  # so that differences in the printed digits are not rounding


def evaluate(model: nn.Module, test: TensorDataset, device: torch.device, wrong: bool) -> str:
    model.eval()
    losses, accuracies, counts = [], [], []
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=256):
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            losses.append(F.cross_entropy(outputs, labels).item())  # mean of this batch
            accuracies.append((outputs.argmax(1) == labels).double().mean().item())
            counts.append(len(labels))
    model.train()
    if wrong:
        counts = [1] * len(counts)  # the last batch is smaller than the others, and counts as much
    loss = sum(c * x for c, x in zip(counts, losses, strict=True)) / sum(counts)
    accuracy = sum(c * x for c, x in zip(counts, accuracies, strict=True)) / sum(counts)
    return f"test loss {loss:.6f}, accuracy {accuracy:.4%}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
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
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {evaluate(model, test, device, args.wrong)}")
    print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.8f}")


if __name__ == "__main__":
    main()
