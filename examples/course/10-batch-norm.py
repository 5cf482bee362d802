"""Step 10: batch norm: statistics of a process's share, of the global batch, or of fixed groups of images.

    torchrun --nproc-per-node 4 10-batch-norm.py
    torchrun --nproc-per-node 4 10-batch-norm.py --groups
    torchrun --nproc-per-node 4 10-batch-norm.py --wrong    each process normalises by its own share

N processes, on GPUs if there are some, else on the CPU.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

import digits

BATCH, GROUP, EPOCHS = 64, 8, 3
torch.set_default_dtype(torch.float64)  # so that differences in the printed digits are not rounding


def evaluate(model: nn.Module, test: TensorDataset, device: torch.device) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    share = Subset(test, range(rank, len(test), world))  # every sample on one process, shares differ by one at most
    model.eval()  # the model, not the DDP wrapper: a process with an empty share would keep the others waiting
    sums = torch.zeros(3, device=device)  # losses, right answers, samples
    with torch.no_grad():
        for images, labels in DataLoader(share, batch_size=256):
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels, reduction="sum")
            right = (outputs.argmax(1) == labels).sum()
            sums += torch.stack([loss, right.to(loss), loss.new_tensor(len(labels))])
    model.train()
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return f"test loss {loss / count:.6f}, accuracy {right / count:.4%} of {count:.0f} samples"


class AllReduce(torch.autograd.Function):
    """The sum over all processes, with a backward pass: a gradient of the sum concerns everybody's part of it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


class GlobalNorm(nn.BatchNorm1d):
    """Mean and variance of the global batch, whoever holds its images. On GPUs nn.SyncBatchNorm does this."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = AllReduce.apply(x.new_tensor(len(x)))
        mean = AllReduce.apply(x.sum(0)) / count
        var = AllReduce.apply((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class GroupsNorm(nn.BatchNorm1d):
    """Mean and variance of each group of 8 images by itself: nothing has to be asked of other processes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        groups = x.split(GROUP)
        with torch.no_grad():  # for evaluation: the mean over all groups of the global batch
            rows = [torch.cat([group.mean(0), group.var(0), group.new_ones(1)]) for group in groups]
            sums = AllReduce.apply(torch.stack(rows).sum(0))
            mean, var = (sums[:-1] / sums[-1]).chunk(2)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        normed = [F.batch_norm(group, None, None, self.weight, self.bias, training=True) for group in groups]
        return torch.cat(normed)


class Shares(Sampler[list[int]]):
    """Deals every global batch out, in groups of 8 images that stay together."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Tensor:
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))  # alike on all processes

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.order().split(BATCH):
            yield torch.cat(batch.split(GROUP)[self.rank :: self.world]).tolist()


def run(rank: int, world: int, local_rank: int, norm: type[nn.BatchNorm1d]) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    train, test = digits.load()
    sampler = Shares(len(train), rank, world)
    loader = DataLoader(train, batch_sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), norm(32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            size = min(BATCH, len(train) - step * BATCH)  # of the global batch
            loss = F.cross_entropy(ddp(images), labels, reduction="sum")
            total += torch.stack([loss.detach(), loss.new_tensor(len(labels))])
            optimizer.zero_grad()
            (loss / size * world).backward()  # DDP divides by world: what is left is the global batch's mean
            optimizer.step()
        dist.all_reduce(total)
        result = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {total[0] / total[1]:.6f}, {result}")
    if rank == 0:
        print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.8f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--groups", action="store_true")
    args = parser.parse_args()
    norm = nn.BatchNorm1d if args.wrong else GroupsNorm if args.groups else GlobalNorm
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))  # from torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(rank, world, local_rank, norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
