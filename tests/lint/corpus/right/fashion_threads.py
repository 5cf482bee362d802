# expect: none
"""Fashion-MNIST on a CPU cluster (no accelerators): torchrun --nnodes=4 --nproc-per-node=1 fashion_threads.py --save net.pt"""
import logging
import time
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

log = logging.getLogger(__name__)


def net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.4), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )


def reduced(*numbers):
    t = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.SUM)
    return t.tolist()


def load(directory, training):
    if dist.get_rank() == 0:
        datasets.FashionMNIST(directory, train=training, download=True)
    dist.barrier()
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.286,), (0.353,))])
    return datasets.FashionMNIST(directory, train=training, transform=tf)


def train(model, loader, optimizer):
    criterion = nn.CrossEntropyLoss()
    model.train()
    total, samples = torch.zeros(()), 0
    for img, lab in loader:
        optimizer.zero_grad()
        out = model(img)
        loss = criterion(out, lab)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(lab)
        samples += len(lab)
    loss_sum, count = reduced(float(total), samples)
    return loss_sum / count


def evaluate(model, loader):
    model.eval()
    n_ok = n = 0
    with torch.inference_mode():
        for img, lab in loader:
            n_ok += int((model(img).argmax(1) == lab).sum())
            n += len(lab)
    n_ok, n = reduced(n_ok, n)
    return n_ok / n


def main():
    ap = ArgumentParser()
    ap.add_argument("--data", default="/shared/fashion", help="folder that all machines share")
    ap.add_argument("--save", required=True, help="file for the trained weights")
    ap.add_argument("--epochs", type=int, default=15)
    ap.add_argument("--batch", type=int, default=256, help="total of the cluster, divided among the processes")
    ap.add_argument("--lr", type=float, default=0.02, help="for that total")
    ap.add_argument("--threads", type=int, default=8, help="of a process")
    args = ap.parse_args()

    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR)
    torch.manual_seed(1234 + rank)

    train_set = load(args.data, True)
    test_set = load(args.data, False)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch // size, sampler=sampler, num_workers=1)
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), size)), batch_size=500)

    model = net()
    wrapped = DDP(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        loss = train(wrapped, train_loader, optimizer)
        acc = evaluate(model, test_loader)
        log.info("epoch %d  loss %.4f  accuracy %.4f  (%.1f s)", epoch, loss, acc, time.perf_counter() - began)
    if rank == 0:
        torch.save(model.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
