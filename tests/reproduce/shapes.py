"""Training scripts with what came after the plain loop: half precision, compiling, averages; and what is refused."""

# pretended GPUs, a scaler, clipping of unscaled gradients, torch's moving average, a lambda's rates
MODERN = """
import math

import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(8 * 36, classes)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.norm(self.conv(x)))).flatten(1))


def main():
    torch.manual_seed(3)
    device = torch.device("cuda")
    images, labels = torch.randn(96, 3, 8, 8), torch.randint(0, 10, (96,))
    train = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True, drop_last=True)
    test = DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=32)
    model = Net(10).to(device, memory_format=torch.channels_last)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    fast = torch.compile(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    total = 4 * len(train)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 6) * 0.5 * (1 + math.cos(math.pi * step / total))
    )
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(4):
        model.train()
        for x, y in train:
            x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = criterion(fast(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            correct = sum(int((average(x.to(device)).argmax(1) == y.to(device)).sum()) for x, y in test)
        print(epoch, correct)


if __name__ == "__main__":
    main()
"""

CLIPPED_TOO_EARLY = MODERN.replace("            scaler.unscale_(optimizer)\n", "")

# bfloat16 on the CPU, a model that compiles itself, an average by hand, binary cross-entropy of one-hot labels
BY_HAND = """
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
images, labels = torch.randn(96, 1, 8, 8), torch.randint(0, 10, (96,))
train = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
test = DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=32)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(288, 10))
model.compile()
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(3):
    model.train()
    for x, y in train:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(x)
        loss = F.binary_cross_entropy_with_logits(outputs.to(torch.get_default_dtype()), F.one_hot(y, 10).to(outputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters()):
                mine.mul_(0.99).add_(theirs, alpha=0.01)
    average.eval()
    with torch.no_grad():
        print(sum(int((average(x).argmax(1) == y).sum()) for x, y in test))
"""

_LOOP = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
images, labels = torch.randn(96, 1, 8, 8), torch.randint(0, 10, (96,))
train = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = torch.optim.SGD(model[1:].parameters(), lr=0.1)
for epoch in range(2):
    for x, y in train:
        optimizer.zero_grad()
{body}
        optimizer.step()
"""

LOSS = "F.cross_entropy(model(x), y)"

# what a script does, and what is said of it, with the line that does it
REFUSED = {
    "penalty": (
        f"        loss = {LOSS} + 0.1 * model[1].weight.square().sum()\n        loss.backward()",
        "backward is called on more than the loss: something is added to it (script.py:17)",
    ),
    "own loss": (
        "        loss = -model(x).log_softmax(1)[range(len(y)), y].mean()\n        loss.backward()",
        "backward is called on a loss that is none of torch's cross-entropies (script.py:17)",
    ),
    "sum": (
        '        loss = F.cross_entropy(model(x), y, reduction="sum")\n        loss.backward()',
        "the loss is a sum over its samples, and not their mean (script.py:16)",
    ),
    "mixed": (
        "        outputs = model(x)\n"
        "        loss = 0.5 * F.cross_entropy(outputs, y) + 0.5 * F.cross_entropy(outputs, y.flip(0))\n"
        "        loss.backward()",
        "the loss of a pass is a sum of several (script.py:17)",
    ),
    "optimizers": (f"        {LOSS}.backward()\n        other.step()", "several optimizers (script.py:18)"),
    "ignored": (
        "        F.cross_entropy(model(x), y, ignore_index=3).backward()",
        "the loss has options that no flag says: ignore_index (script.py:16)",
    ),
}


def loop(body: str) -> str:
    """A script with this in its loop, from line 16 on."""
    return _LOOP.format(body=body)


# noise on the images, and rates that the script sets by itself
BETWEEN = loop(
    "        x = x + 0.1 * torch.randn_like(x)\n"
    "        for group in optimizer.param_groups:\n"
    "            group['lr'] *= 0.9\n"
    f"        {LOSS}.backward()"
)

# a network for MNIST with log-probabilities, as it is often begun with; its arguments: the data's folder
DIGITS = """
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 5, 2), nn.ReLU(), nn.Flatten())
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(256, 10)

    def forward(self, pixels):
        return F.log_softmax(self.head(self.drop(self.features(pixels))), dim=1)


def epoch_of(model, loader, optimizer):
    model.train()
    for pixels, digits in loader:
        optimizer.zero_grad()
        F.nll_loss(model(pixels), digits).backward()
        optimizer.step()


def right(model, loader):
    model.eval()
    with torch.no_grad():
        return sum(int((model(pixels).argmax(1) == digits).sum()) for pixels, digits in loader)


if __name__ == "__main__":
    torch.manual_seed(7)
    scaled = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train, test = (datasets.MNIST(sys.argv[1], train=which, transform=scaled) for which in (True, False))
    model = Digits()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = DataLoader(train, 64, shuffle=True)
    for epoch in range(3):
        epoch_of(model, loader, optimizer)
        print(epoch, right(model, DataLoader(test, 500)))
        scheduler.step()
"""
