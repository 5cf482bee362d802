# expect: load-without-map-location line 101
"""CS homework 4, data parallelism. STL-10, one machine, one process per GPU (torch.multiprocessing.spawn).

Q1 trains and prints a learning curve, Q2 tests the best model of Q1.
"""
import argparse
import json
import os
import socket
import tempfile

import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

MEAN, STD = (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class StudentNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.features = nn.Sequential(conv(3, width, 2), conv(width, width), conv(width, 2 * width, 2),
                                      conv(2 * width, 2 * width), conv(2 * width, 4 * width, 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, 10))

    def forward(self, x):
        return self.head(self.features(x))


def train_valid_split(root, seed):
    normalize = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    noisy = datasets.STL10(root, "train", transform=transforms.Compose(
        [transforms.RandomCrop(96, 12), transforms.RandomHorizontalFlip()] + normalize))
    clean = datasets.STL10(root, "train", transform=transforms.Compose(normalize))
    generator = torch.Generator().manual_seed(seed)
    train_idx, valid_idx = random_split(range(len(clean)), [4000, 1000], generator=generator)
    return Subset(noisy, list(train_idx)), Subset(clean, list(valid_idx))


def my_part(dataset, rank, world):
    return Subset(dataset, range(rank, len(dataset), world))


def accuracy(net, loader, device):
    net.eval()
    correct = torch.tensor(0, device=device)
    n = torch.tensor(0, device=device)
    with torch.no_grad():
        for x, y in loader:
            y = y.to(device)
            correct += (net(x.to(device)).argmax(1) == y).sum()
            n += len(y)
    dist.all_reduce(correct)
    dist.all_reduce(n)
    return correct.item() / n.item()


def q1_train(rank, world, device, args, best_path):
    train_set, valid_set = train_valid_split(args.root, args.seed)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank)
    train_loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler, num_workers=2)
    valid_loader = DataLoader(my_part(valid_set, rank, world), batch_size=100)

    net = nn.SyncBatchNorm.convert_sync_batchnorm(StudentNet()).to(device)
    model = DDP(net, device_ids=[rank])
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    loss_fn = nn.CrossEntropyLoss()

    curve, best = [], -1.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
        scheduler.step()
        acc = accuracy(net, valid_loader, device)
        curve.append(acc)
        if rank == 0:
            print(f"[Q1] epoch {epoch + 1:3d}  validation accuracy {100 * acc:.2f} %")
            if acc > best:
                best = acc
                torch.save(net.state_dict(), best_path)
    return net, curve


def q2_test(rank, world, device, args, net, best_path):
    dist.barrier()        # the best model may still be on its way to the disk
    net.load_state_dict(torch.load(best_path, weights_only=True))
    test_set = datasets.STL10(args.root, "test", transform=transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]))
    return accuracy(net, DataLoader(my_part(test_set, rank, world), batch_size=100), device)


def process(rank, world, port, args, folder):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    torch.cuda.set_device(rank)           # one machine only
    dist.init_process_group("nccl", rank=rank, world_size=world)
    device = torch.device("cuda", rank)
    torch.manual_seed(args.seed + rank)
    best_path = os.path.join(folder, "best.pt")
    net, curve = q1_train(rank, world, device, args, best_path)
    acc = q2_test(rank, world, device, args, net, best_path)
    if rank == 0:
        print(f"[Q2] test accuracy {100 * acc:.2f} %")
        with open(args.answers, "w") as f:
            json.dump({"curve": curve, "test": acc}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("answers", help="JSON file to write")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=200, help="of all GPUs together")
    parser.add_argument("--lr", type=float, default=0.05, help="for this batch size")
    parser.add_argument("--seed", type=int, default=2024)
    arguments = parser.parse_args()

    datasets.STL10(arguments.root, "train", download=True)
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    n_gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as tmp:
        mp.spawn(process, args=(n_gpus, port, arguments, tmp), nprocs=n_gpus, join=True)
