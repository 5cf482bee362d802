# expect: nccl-on-cpu line 47 or 48 or 59
"""Fashion-MNIST on the cores of one machine: forked processes, no GPU."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, ToTensor


class Clothes(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 7 * 7, 10))

    def forward(self, x):
        return self.head(self.features(x))


def score(net, part, device):
    net.eval()
    result = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.inference_mode():
        for x, y in part:
            x, y = x.to(device), y.to(device)
            out = net(x)
            result[0] += nn.functional.cross_entropy(out, y, reduction="sum").double()
            result[1] += (out.argmax(1) == y).sum()
            result[2] += len(y)
    dist.all_reduce(result)
    loss, hits, n = result.tolist()
    return loss / n, hits / n


def process(rank, args, rendezvous):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=args.processes)
    device = torch.device("cpu")

    scale = Normalize((0.286,), (0.353,))
    training = FashionMNIST(args.data, train=True, transform=Compose([RandomHorizontalFlip(), ToTensor(), scale]))
    testing = FashionMNIST(args.data, train=False, transform=Compose([ToTensor(), scale]))
    order = DistributedSampler(training, seed=args.seed)
    feed = DataLoader(training, batch_size=args.batch // args.processes, sampler=order, drop_last=True)
    part = DataLoader(Subset(testing, range(rank, len(testing), args.processes)), batch_size=500)

    torch.manual_seed(args.seed)
    net = Clothes().to(device)
    model = DDP(net)
    torch.manual_seed(args.seed + 1 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        order.set_epoch(epoch)
        model.train()
        for x, y in feed:
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        loss, accuracy = score(net, part, device)
        if rank == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}, test accuracy {accuracy:.4f}")

    if rank == 0 and args.save:
        torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--save")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=256, help="of all processes together")
    parser.add_argument("--lr", type=float, default=1e-3, help="for the batch of all processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=13)
    args = parser.parse_args()
    if args.batch % args.processes:
        parser.error("--batch must be a multiple of --processes")
    FashionMNIST(args.data, train=True, download=True)      # once, before there are several
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(process, args=(args, os.path.join(folder, "rendezvous")),
                           nprocs=args.processes, start_method="fork")


if __name__ == "__main__":
    main()
