# expect: none
"""One process, all GPUs of it: nn.DataParallel cuts every batch. No process group, no sampler."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def main():
    torch.manual_seed(0)
    device = torch.device("cuda:0")
    normalize = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    train_transform = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]
    )
    test_transform = transforms.Compose([transforms.ToTensor(), normalize])
    train_set = datasets.CIFAR10("data", train=True, download=True, transform=train_transform)
    test_set = datasets.CIFAR10("data", train=False, download=True, transform=test_transform)
    train_loader = DataLoader(train_set, batch_size=256, shuffle=True, num_workers=8, pin_memory=True)
    test_loader = DataLoader(test_set, batch_size=1000, num_workers=8)

    model = models.resnet18(num_classes=10)
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    model.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)

    for epoch in range(100):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        scheduler.step()

        model.eval()
        correct = torch.zeros((), dtype=torch.long, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        print(f"epoch {epoch}: {100 * correct.item() / len(test_set):.2f}%")
    bare = model.module if isinstance(model, nn.DataParallel) else model
    torch.save(bare.state_dict(), "resnet18.pt")


if __name__ == "__main__":
    main()
