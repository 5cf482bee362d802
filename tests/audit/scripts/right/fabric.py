"""Lightning Fabric: it starts nothing by itself under torchrun, wraps, moves, and shares the samples out."""

import os

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    world_size = int(os.environ["WORLD_SIZE"])
    fabric = lightning.Fabric(accelerator="cuda", devices=world_size, strategy="ddp", precision="16-mixed")
    fabric.launch()
    fabric.seed_everything(3, verbose=False)
    inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(8))
    dataset = TensorDataset(inputs, inputs[:, :4].argmax(1))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=32 // world_size, shuffle=True))
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(inputs), labels))
            optimizer.step()
    fabric.print("done")


if __name__ == "__main__":
    main()
