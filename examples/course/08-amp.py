"""Step 8: mixed precision: float16 where it is fast, float32 where it is needed.

    torchrun --nproc-per-node 4 08-amp.py
    torchrun --nproc-per-node 4 08-amp.py --wrong       the gradients are clipped while they are scaled

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
LARGEST = 1.0  # the norm that gradients are clipped to; single precision from here: autocast leaves double as it is


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
    return f"test loss {loss / count:.2f}, accuracy {right / count:.0%} of {count:.0f} samples"


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
    scaler = torch.amp.GradScaler(device.type)  # small gradients would be 0 in float16: the loss is multiplied by 65536
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)  # sum of the losses, number of samples
        for step, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            size = min(BATCH, len(train) - step * BATCH)  # of the global batch
            with torch.autocast(device.type, dtype=torch.float16):  # the forward pass; backward follows its types
                outputs = ddp(images)
            loss = F.cross_entropy(outputs.float(), labels, reduction="sum")
            total += torch.stack([loss.detach(), loss.new_tensor(len(labels))])
            optimizer.zero_grad()
            scaler.scale(loss / size * world).backward()
            if not wrong:
                scaler.unscale_(optimizer)  # else what is clipped is 65536 times the gradient
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST)
            scaler.step(optimizer)  # divides by the scale, unless unscale_ did; leaves the step out if there is an inf
            scaler.update()
        dist.all_reduce(total)
        result = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {total[0] / total[1]:.2f}, {result}")
    if rank == 0:
        print(f"weights {nn.utils.parameters_to_vector(model.parameters()).norm().item():.1f}")


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
