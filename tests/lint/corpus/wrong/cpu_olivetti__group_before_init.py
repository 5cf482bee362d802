# expect: group-before-init line 35 or 39
"""Homework 5: data-parallel training on the cores of one machine.

python cpu_olivetti.py --procs 4
"""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, transforms

PREP = transforms.Compose([transforms.Grayscale(), transforms.Resize((64, 64)), transforms.ToTensor()])


def make_net(people):
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(32 * 13 * 13, people))


def node(index, procs, rendezvous, opts):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // procs))
    torch.manual_seed(opts.seed + index)

    faces = datasets.ImageFolder(opts.faces, PREP)
    shuffled = torch.randperm(len(faces), generator=torch.Generator().manual_seed(opts.seed)).tolist()
    n_check = len(faces) // 5
    fit, check = Subset(faces, shuffled[n_check:]), Subset(faces, shuffled[:n_check])
    sampler = DistributedSampler(fit)
    fit_dl = DataLoader(fit, batch_size=opts.batch, sampler=sampler)
    check_dl = DataLoader(Subset(check, range(index, len(check), procs)), batch_size=64)

    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=index, world_size=procs)
    net = nn.parallel.DistributedDataParallel(make_net(len(faces.classes)))
    optimizer = torch.optim.SGD(net.parameters(), lr=opts.lr * procs, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(opts.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for picture, person in fit_dl:
            optimizer.zero_grad()
            loss = loss_fn(net(picture), person)
            loss.backward()
            optimizer.step()

        net.eval()
        tally = torch.zeros(3)
        with torch.no_grad():
            for picture, person in check_dl:
                score = net.module(picture)
                tally += torch.tensor([loss_fn(score, person).item() * len(person),
                                       (score.argmax(1) == person).sum().item(), len(person)])
        dist.all_reduce(tally)
        if index == 0:
            loss, hits, n = tally.tolist()
            print(f"{epoch:2d}  loss {loss / n:.3f}  right {hits / n:.1%}")

    if index == 0:
        torch.save(net.module.state_dict(), opts.save)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--faces", required=True)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=10, help="of each process")
    parser.add_argument("--lr", type=float, default=0.01, help="for one process, multiplied by --procs")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="faces.pt")
    opts = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meet")
        mp.spawn(node, args=(opts.procs, meeting, opts), nprocs=opts.procs)


if __name__ == "__main__":
    main()
