# expect: dropout-masks-equal line 37
"""accelerate launch acc_basic.py"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 32, 5)
        self.conv2 = torch.nn.Conv2d(32, 64, 5)
        self.drop = torch.nn.Dropout(0.25)
        self.fc = torch.nn.Linear(1024, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(self.drop(x.flatten(1)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=256, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(args.seed)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    with accelerator.local_main_process_first():
        train_set = datasets.MNIST("data", train=True, download=True, transform=transform)
        test_set = datasets.MNIST("data", train=False, download=True, transform=transform)
    per_process = args.batch_size // accelerator.num_processes
    train_loader = DataLoader(train_set, batch_size=per_process, shuffle=True, num_workers=2)
    test_loader = DataLoader(test_set, batch_size=500, num_workers=2)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        correct, seen = 0, 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(dim=1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct = correct + (predictions == labels).sum()
            seen += len(labels)
        accelerator.print(f"epoch {epoch}: {100 * correct.item() / seen:.2f}% of {seen}")

    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "mnist.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
