"""Step 11: dropout and seeds.

    torchrun --nproc-per-node 4 11-dropout.py
    torchrun --nproc-per-node 4 11-dropout.py --by-rank     every process has a seed of its own
    torchrun --nproc-per-node 4 11-dropout.py --wrong       all processes have the same seed

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

BATCH, EPOCHS = 64, 3
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


class Dropout(nn.Module):
    """Dropout whose masks are drawn for the whole global batch, alike on all processes; each takes its own rows."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world, self.mask = rank, world, torch.empty(0)

    def draw(self, rows: int, seed: int | None) -> None:
        """Masks for the next forward pass. Without a seed: for this process's rows, by its own generator."""
        if seed is None:
            self.mask = torch.rand(rows, 32)
        else:
            self.mask = torch.rand(rows, 32, generator=torch.Generator().manual_seed(seed))[self.rank :: self.world]

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.mask > 0.5).to(x) * 2 if self.training else x


def different(mask: Tensor, world: int) -> int:
    """How many masks of a step, over all processes, are different ones."""
    masks = [torch.empty_like(mask) for _ in range(world)]
    dist.all_gather(masks, mask)
    return len(torch.cat(masks).unique(dim=0))


class Shares(Sampler[list[int]]):
    """Deals every global batch out: nothing dropped, nothing repeated, and shares that differ by one at most."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Tensor:
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))  # alike on all processes

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.order().split(BATCH):
            yield batch[self.rank :: self.world].tolist()


def run(rank: int, world: int, local_rank: int, wrong: bool, by_rank: bool) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    train, test = digits.load()
    sampler = Shares(len(train), rank, world)
    loader = DataLoader(train, batch_sampler=sampler)

    torch.manual_seed(0)
    dropout = Dropout(rank, world)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), dropout, nn.Linear(32, 10)).to(device)
    if by_rank:
        torch.manual_seed(rank)  # after the weights are made
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            size = min(BATCH, len(train) - step * BATCH)  # of the global batch
            if wrong or by_rank:
                dropout.draw(len(labels), seed=None)
            else:
                dropout.draw(size, seed=epoch * len(train) + step)
            if epoch == step == 0:
                masks = different(dropout.mask.to(device), world)
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
        print(f"{masks} different masks in the first step")
        print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.8f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--by-rank", action="store_true")
    args = parser.parse_args()
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))  # from torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(rank, world, local_rank, args.wrong, args.by_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
