"""No wrapper; the ranks' shares differ by one sample, so one rank has a batch more, whose all_reduce nobody answers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(129, 10, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, (inputs.sum(1) > 0).float())
    share = Subset(dataset, range(rank, len(dataset), size))
    loader = DataLoader(share, batch_size=32 // size)
    torch.manual_seed(1234)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= size
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
