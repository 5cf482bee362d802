"""mnist_before.py with its faults mended by hand: `torchrun --nproc-per-node 2 mnist_mended.py`, to compare."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import lockstep as ls
from net import mnist_net


class Shares:
    """This rank's part of each global batch, in the order that mnist_after.py has. Stands for a sampler of batches."""

    def __init__(self, order, epoch=0):
        self.order, self.epoch = order, epoch

    def __iter__(self):
        for ids in self.order.steps(self.epoch):
            yield torch.from_numpy(ids).tensor_split(dist.get_world_size())[dist.get_rank()].tolist()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="data")
    parser.add_argument("--fraction", type=float, default=1.0)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if int(os.environ["LOCAL_RANK"]) > 0:
        dist.barrier()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_set = datasets.MNIST(args.data, train=True, download=True, transform=transform)
    test_set = datasets.MNIST(args.data, train=False, transform=transform)
    if int(os.environ["LOCAL_RANK"]) == 0:
        dist.barrier()
    shares = Shares(ls.Order(len(train_set), batch_size=64, seed=1, fraction=args.fraction))
    part = range(dist.get_rank(), len(test_set), dist.get_world_size())
    torch.manual_seed(1)
    net = mnist_net(dropout=0)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        shares.epoch = epoch
        total = torch.zeros(2, dtype=torch.float64)  # sums and counts, divided once
        net.train()
        for images, labels in DataLoader(train_set, batch_sampler=shares):
            batch = torch.tensor(len(labels))
            dist.all_reduce(batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum")
            (loss * dist.get_world_size() / batch).backward()  # DDP divides by the ranks
            optimizer.step()
            total += torch.tensor([loss.detach(), len(labels)])
        scheduler.step()
        right = torch.zeros(2, dtype=torch.float64)
        net.eval()
        with torch.no_grad():
            for images, labels in DataLoader(test_set, 1000, sampler=part):
                right += torch.tensor([(net(images).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(total)
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.6f} accuracy {right[0] / right[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
