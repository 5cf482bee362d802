# expect: eval-padding-counted line 54 or 52
import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(9216, 10))

    def forward(self, x):
        return self.classifier(self.features(x))


def train(fabric, model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        fabric.backward(loss)
        optimizer.step()


def test(fabric, model, loader):
    model.eval()
    counts = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for data, target in loader:
            counts[0] += (model(data).argmax(dim=1) == target).sum()
            counts[1] += len(target)
    counts = fabric.all_reduce(counts, reduce_op="sum")
    return (counts[0] / counts[1]).item()


def run(args):
    fabric = Fabric(accelerator="cuda", devices=args.devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(args.seed)  # the seed of the sampler's order too, so the same on all ranks

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    with fabric.rank_zero_first(local=True):
        train_set = datasets.MNIST("data", train=True, download=fabric.local_rank == 0, transform=transform)
        test_set = datasets.MNIST("data", train=False, transform=transform)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // fabric.world_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=1000)
    train_loader = fabric.setup_dataloaders(train_loader)  # gets a distributed sampler, told of each epoch by Fabric
    test_loader = fabric.setup_dataloaders(test_loader)

    model = ConvNet()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(args.seed + fabric.global_rank)  # from here on dropout, whose masks shall differ
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(args.epochs):
        train(fabric, model, train_loader, optimizer)
        accuracy = test(fabric, model, test_loader)
        fabric.print(f"epoch {epoch}: {accuracy:.4f}")
        scheduler.step()
    fabric.save("mnist.ckpt", {"model": model})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="global")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
