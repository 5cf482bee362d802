"""Step 12: checkpoints: stop, and go on, on as many processes as you like.

    torchrun --nproc-per-node 4 12-checkpoint.py --file run.pt --stop 2
    torchrun --nproc-per-node 4 12-checkpoint.py --file run.pt              goes on after epoch 2
    torchrun --nproc-per-node 4 12-checkpoint.py --file run.pt --wrong      goes on with the weights alone

N processes, on GPUs if there are some, else on the CPU.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

import digits

BATCH, EPOCHS = 64, 4
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

    def draw(self, rows: int, seed: int) -> None:
        """Masks for the next forward pass."""
        self.mask = torch.rand(rows, 32, generator=torch.Generator().manual_seed(seed))[self.rank :: self.world]

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.mask > 0.5).to(x) * 2 if self.training else x


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


def save(file: str, state: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        torch.save(state, f"{file}.new")
        Path(f"{file}.new").replace(file)  # under its name the file is whole at any time
    dist.barrier()  # nobody goes on, to read it or to end, before it is there


def run(rank: int, world: int, local_rank: int, wrong: bool, file: str, stop: int) -> None:
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
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    first = 0
    if file and Path(file).exists():
        state = torch.load(file, map_location=device, weights_only=True)  # else all would load onto the GPU of rank 0
        model.load_state_dict(state["model"])
        if not wrong:
            optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]

    for epoch in range(first, stop):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            size = min(BATCH, len(train) - step * BATCH)  # of the global batch
            dropout.draw(size, seed=epoch * len(train) + step)
            loss = F.cross_entropy(ddp(images), labels, reduction="sum")
            total += torch.stack([loss.detach(), loss.new_tensor(len(labels))])
            optimizer.zero_grad()
            (loss / size * world).backward()  # DDP divides by world: what is left is the global batch's mean
            optimizer.step()
        dist.all_reduce(total)
        result = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {total[0] / total[1]:.6f}, {result}")
        if file:
            save(file, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1})
    if rank == 0:
        print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.8f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--file", default="", help="checkpoint to write, and to go on from where it is there")
    parser.add_argument("--stop", type=int, default=EPOCHS, help="end after so many epochs, as a job whose time is up")
    args = parser.parse_args()
    rank, world, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))  # from torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(rank, world, local_rank, args.wrong, args.file, args.stop)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
