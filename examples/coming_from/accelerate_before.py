"""A loop with Accelerate: `accelerate launch --cpu --num_processes 2 accelerate_before.py`, or torchrun."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, Sampler

import lockstep as ls
from net import digits, digits_net


class InOrder(Sampler):
    """The order that accelerate_after.py has, so that the two can be compared. Usually shuffle=True."""

    epoch = 0
    order = ls.Order(1437, batch_size=64, seed=0)

    def __iter__(self):
        for ids in self.order.steps(self.epoch):
            yield from ids.tolist()

    def __len__(self):
        return 1437


def main():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))  # 64 in all, not each
    torch.manual_seed(0)
    model, sampler = digits_net(), InOrder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(digits(), batch_size=64, sampler=sampler, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        sampler.epoch = epoch
        total = torch.zeros(())
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.reduce(total, "mean") / len(loader)
        accelerator.print(f"epoch {epoch + 1}: loss {mean:.6f}")


if __name__ == "__main__":
    main()
