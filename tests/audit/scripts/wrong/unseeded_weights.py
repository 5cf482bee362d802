"""No wrapper and no seed: every rank begins with weights of its own, and the averaged gradients fit none of them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(256, 12, generator=torch.Generator().manual_seed(11))
    labels = inputs[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(2):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(32):
            own = batch[rank::world_size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[own]), labels[own])
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"Rank {rank}, epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
