"""Step 3: one process per GPU: DistributedDataParallel, started by torchrun.

    torchrun --nproc-per-node 4 03-ddp-torchrun.py
    torchrun --nproc-per-node 4 03-ddp-torchrun.py --wrong      every process takes the whole batch size

N processes, on GPUs if there are some, else on the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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


def run(rank: int, world: int, local_rank: int, wrong: bool) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    train, test = digits.load()
    batch = BATCH if wrong else BATCH // world  # of this process: all of them together make up the batch of a step
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, batch_size=batch, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()  # averages the gradients over the processes
            optimizer.step()
        result = evaluate(model, test, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(loader)} steps, {result}")
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
