"""One process, one GPU: accumulation with the loss scaled, evaluation, a scheduler per epoch."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, random_split
from torchvision import datasets, models, transforms

ACCUMULATE = 4
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def train_one_epoch(model, criterion, optimizer, loader, clip):
    model.train()
    running_loss = torch.zeros((), device=device)
    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        inputs, targets = inputs.to(device), targets.to(device)
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        running_loss += loss.detach() * inputs.size(0)
        loss = loss / ACCUMULATE
        loss.backward()
        if (i + 1) % ACCUMULATE == 0 or (i + 1) == len(loader):
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return running_loss.item() / len(loader.dataset)


def validate(model, loader):
    model.eval()
    correct = total = 0
    with torch.inference_mode():
        for inputs, targets in loader:
            outputs = model(inputs.to(device))
            correct += (outputs.argmax(1).cpu() == targets).sum().item()
            total += targets.size(0)
    return correct / total


def main():
    torch.manual_seed(0)
    normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    train_tf = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize])
    full = datasets.CIFAR10("data", train=True, download=True, transform=train_tf)
    train_set, val_set = random_split(full, [45000, 5000], generator=torch.Generator().manual_seed(0))
    test_set = datasets.CIFAR10("data", train=False, download=True, transform=transforms.ToTensor())
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True, num_workers=4, worker_init_fn=seed_worker)
    val_loader = DataLoader(val_set, batch_size=256)
    test_loader = DataLoader(test_set, batch_size=256)
    model = models.resnet18(num_classes=10).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    start_epoch, best_acc = 0, 0.0
    checkpoint = torch.load("checkpoint.pth", map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    start_epoch = checkpoint["epoch"] + 1
    for epoch in range(start_epoch, 20):
        loss = train_one_epoch(model, criterion, optimizer, train_loader, 1.0)
        acc = validate(model, val_loader)
        scheduler.step()
        print(epoch, loss, acc)
        if acc > best_acc:
            best_acc = acc
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            },
            "checkpoint.pth",
        )
    print("test", validate(model, test_loader))


if __name__ == "__main__":
    main()
