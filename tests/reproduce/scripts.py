"""Small training scripts of the usual shapes, as texts."""

PLAIN = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 4


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(1, WIDTH, 3)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(WIDTH * 36, classes)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.conv(x))).flatten(1))


def main():
    torch.manual_seed(3)
    images, labels = torch.randn(96, 1, 8, 8), torch.randint(0, 10, (96,))
    train = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=32)
    model = Net(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for epoch in range(6):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
        print(epoch, correct)


if __name__ == "__main__":
    main()
"""
