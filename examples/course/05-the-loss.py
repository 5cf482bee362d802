"""Step 5: why the loss isn't the loss: means of unequal shares.

    torchrun --nproc-per-node 4 05-the-loss.py
    torchrun --nproc-per-node 4 05-the-loss.py --wrong      each takes the mean of its share, rank 0 prints its own

N processes, on GPUs if there are some, else on the CPU.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

import digits

BATCH, EPOCHS = 64, 3
torch.set_default_dtype(torch.float64)  # so that differences in the printed digits are not rounding


def evaluate(model: nn.Module, test: TensorDataset, device: torch.device) -> str:
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for images, labels in DataLoader(test, batch_size=256):
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            loss += F.cross_entropy(outputs, labels, reduction="sum").item()
            correct += (outputs.argmax(1) == labels).sum().item()
    model.train()
    return f"test loss {loss / len(test):.6f}, accuracy {correct / len(test):.4%}"


class Shares(Sampler[list[int]]):
    """Deals every global batch out: nothing dropped, nothing repeated, and shares that differ by one at most."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.size, self.rank, self.world = size, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(0))  # the same on all processes
        for batch in order.split(BATCH):
            yield batch[self.rank :: self.world].tolist()


def run(rank: int, world: int, local_rank: int, wrong: bool) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    train, test = digits.load()
    loader = DataLoader(train, batch_sampler=Shares(len(train), rank, world))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            size = min(BATCH, len(train) - step * BATCH)  # of the global batch
            loss = F.cross_entropy(ddp(images), labels, reduction="sum")
            total += torch.stack([loss.detach(), loss.new_tensor(len(labels))])
            # DDP averages over the processes. An average of means is not the mean where shares are unequal.
            mean = loss / len(labels) if wrong else loss / size * world
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
        if not wrong:
            dist.all_reduce(total)  # else what rank 0 prints is the mean of its own shares
        result = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {total[0] / total[1]:.6f}, {result}")
    if rank == 0:
        print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.8f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    args = parser.parse_args()
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))  # from torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(rank, world, local_rank, args.wrong)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
