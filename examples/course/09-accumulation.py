"""Step 9: gradient accumulation: a batch in several passes, for when it doesn't fit into memory.

    torchrun --nproc-per-node 4 09-accumulation.py
    torchrun --nproc-per-node 4 09-accumulation.py --wrong      no_sync around backward alone, and the remainder is lost

N processes, on GPUs if there are some, else on the CPU.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

import digits

BATCH, MICRO, EPOCHS = 64, 16, 3  # MICRO: as many images as fit into memory at once, over all processes
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


class Shares(Sampler[list[int]]):
    """Cuts every global batch into micro-batches, and deals each of those out to the processes."""

    def __init__(self, size: int, rank: int, world: int) -> None:
        self.size, self.rank, self.world, self.epoch = size, rank, world, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> Tensor:
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))  # alike on all processes

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.order().split(BATCH):
            for micro in batch.split(MICRO):
                yield micro[self.rank :: self.world].tolist()


def counted(count: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does with a bucket of gradients, and counts it."""
    count[0] += 1
    return allreduce_hook(dist.group.WORLD, bucket)


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
    reductions = [0]
    ddp.register_comm_hook(reductions, counted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        steps = reductions[0] = 0
        for number, (images, labels) in enumerate(loader):
            images, labels = images.to(device), labels.to(device)
            step, part = divmod(number, BATCH // MICRO)
            size = min(BATCH, len(train) - step * BATCH)  # of the global batch
            if wrong:  # the remainder of an epoch never fills a batch; and no_sync comes too late
                last = (number + 1) % (BATCH // MICRO) == 0
                loss = F.cross_entropy(ddp(images), labels) / (BATCH // MICRO)
                with nullcontext() if last else ddp.no_sync():
                    loss.backward()
            else:
                last = (part + 1) * MICRO >= size
                with nullcontext() if last else ddp.no_sync():  # around forward too: it is what prepares the all-reduce
                    loss = F.cross_entropy(ddp(images), labels, reduction="sum")
                    (loss / size * world).backward()  # adds to the gradients; the last one averages them
            if last:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        result = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: {steps} steps, {reductions[0]} all-reduces, {result}")
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
