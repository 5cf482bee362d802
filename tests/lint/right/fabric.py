"""Fabric: the script keeps its loop; reduced sums, rank 0 prints."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main():
    fabric = Fabric(accelerator="cuda", devices=4, strategy="ddp")
    fabric.launch()
    with fabric.rank_zero_first():
        train_set = datasets.MNIST("data", train=True, download=True, transform=transforms.ToTensor())
    fabric.seed_everything(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(train_set, batch_size=64 // fabric.world_size, shuffle=True))
    fabric.seed_everything(1 + fabric.global_rank)  # after the loaders, whose samplers take the seed
    for epoch in range(5):
        model.train()
        sums = torch.zeros(2, device=fabric.device)
        for i, (images, labels) in enumerate(loader):
            accumulating = (i + 1) % 4 != 0 and i + 1 != len(loader)
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = F.cross_entropy(model(images), labels)
                fabric.backward(loss / 4)
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
            sums += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
        sums = fabric.all_reduce(sums, reduce_op="sum")
        fabric.print(f"epoch {epoch}: {sums[0] / sums[1]:.4f}")
    fabric.save("model.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
