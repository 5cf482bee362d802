# expect: none
import os

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from torch import nn

from helpers import Network, Settings, Tally, build_loaders


def train_epoch(accelerator, model, loader, optimizer):
    model.train()
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


@torch.inference_mode()
def test(accelerator, model, loader):
    model.eval()
    tally = Tally(accelerator)
    for images, labels in loader:
        tally.add(model(images), labels)
    return tally.accuracy()


class Epoch:
    def __init__(self):
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def training(settings):
    accelerator = Accelerator()
    set_seed(21, device_specific=True)
    train_loader, test_loader = build_loaders(accelerator, settings)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    epoch = Epoch()
    accelerator.register_for_checkpointing(epoch)
    if os.path.isdir(settings.checkpoint):
        accelerator.load_state(settings.checkpoint)
    accelerator.wait_for_everyone()
    while epoch.next < settings.epochs:
        train_epoch(accelerator, model, train_loader, optimizer)
        accuracy = test(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch.next}: {accuracy:.4f}")
        epoch.next += 1
        accelerator.save_state(settings.checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    notebook_launcher(training, (Settings(),), num_processes=2)
