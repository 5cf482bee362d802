# expect: eval-part-as-whole line 49 or 46 or main.py:27
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


@dataclass
class Settings:
    epochs: int = 12
    global_batch: int = 512
    lr: float = 2e-3
    checkpoint: str = "kmnist-checkpoint"


class Network(nn.Module):
    def __init__(self, hidden=400):
        super().__init__()
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(784, hidden)
        self.drop = nn.Dropout(0.4)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.hidden(self.flatten(x)))))


def build_loaders(accelerator, settings):
    with accelerator.local_main_process_first():
        train = datasets.KMNIST("data", train=True, download=True, transform=transforms.ToTensor())
        test = datasets.KMNIST("data", train=False, download=True, transform=transforms.ToTensor())
    batch = settings.global_batch // accelerator.num_processes
    return DataLoader(train, batch, shuffle=True, drop_last=True), DataLoader(test, 1000, shuffle=False)


class Tally:
    """Right answers and how many there could be."""

    def __init__(self, accelerator):
        self.hits, self.seen = torch.zeros((), device=accelerator.device), 0

    def add(self, logits, labels):
        self.hits += (logits.argmax(-1) == labels).sum()
        self.seen += labels.shape[0]

    def accuracy(self):
        return self.hits.item() / self.seen
