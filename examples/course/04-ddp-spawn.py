"""Step 4: the same without torchrun: the program starts its processes.

    python 04-ddp-spawn.py --nproc 4
    python 04-ddp-spawn.py --nproc 4 --wrong    on a fixed port: fails while another run has it

N processes, on GPUs if there are some, else on the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def run(rank: int, world: int, port: int | None) -> None:
    if port is None:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355")  # as in a thousand scripts
        store = None
    else:
        store = dist.TCPStore("localhost", port)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=world)
    train, test = digits.load()
    batch = BATCH // world  # of this process: all of them together make up the batch of a step
    sampler = DistributedSampler(train, world, rank)
    loader = DataLoader(train, batch_size=batch, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    ddp = DistributedDataParallel(model, device_ids=[rank] if gpu else None)
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
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", action="store_true")
    parser.add_argument("--nproc", type=int, default=max(1, torch.cuda.device_count()))
    args = parser.parse_args()
    if args.wrong:
        port = None
    else:  # port 0: the system finds a free one, and this process holds it until the end
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = store.port
    mp.spawn(run, args=(args.nproc, port), nprocs=args.nproc)  # run(rank, *args) in each


if __name__ == "__main__":
    main()
