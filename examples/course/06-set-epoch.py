"""Step 6: who sees what, and in which order.

    torchrun --nproc-per-node 4 06-set-epoch.py
    torchrun --nproc-per-node 4 06-set-epoch.py --wrong     set_epoch is forgotten

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
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Tensor:
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))  # alike on all processes

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.order().split(BATCH):
            yield batch[self.rank :: self.world].tolist()


def run(rank: int, world: int, local_rank: int, wrong: bool) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    train, test = digits.load()
    sampler = Shares(len(train), rank, world)
    loader = DataLoader(train, batch_sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        if not wrong:
            sampler.set_epoch(epoch)  # else every epoch has the order of the first one
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
            print(f"epoch {epoch + 1}: first samples {sampler.order()[:4].tolist()}, {result}")
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
