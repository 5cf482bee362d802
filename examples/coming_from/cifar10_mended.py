"""cifar10_before.py with its faults mended by hand: `python cifar10_mended.py --nproc 2`, to compare. On CPUs.

Batch norm's statistics stay a process's own: torch's SyncBatchNorm needs GPUs. The running ones are averaged.
"""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms

import lockstep as ls


class Shares:
    """This rank's part of each global batch, in the order of cifar10_after.py. Stands for a sampler of batches."""

    def __init__(self, order, epoch=0):
        self.order, self.epoch = order, epoch

    def __iter__(self):
        for ids in self.order.steps(self.epoch):
            yield torch.from_numpy(ids).tensor_split(dist.get_world_size())[dist.get_rank()].tolist()


def evaluate(net, test_set):
    for buffer in net.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= dist.get_world_size()
    part = range(dist.get_rank(), len(test_set), dist.get_world_size())
    right = torch.zeros(2, dtype=torch.float64)
    net.eval()
    with torch.no_grad():
        for images, labels in DataLoader(test_set, 256, sampler=part):
            right += torch.tensor([(net(images).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(right)
    return right[0] / right[1]


def train(rank, port, args):
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.nproc)
    if rank > 0:
        dist.barrier()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
    train_set, test_set = (datasets.CIFAR10(args.data, part, transform, download=True) for part in (True, False))
    if rank == 0:
        dist.barrier()
    shares = Shares(ls.Order(len(train_set), batch_size=32, seed=0, fraction=args.fraction))
    torch.manual_seed(0)
    net = models.resnet18(num_classes=10)
    model = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        shares.epoch = epoch
        total = torch.zeros(2, dtype=torch.float64)  # sums and counts, divided once
        net.train()
        for images, labels in DataLoader(train_set, batch_sampler=shares):
            batch = torch.tensor(len(labels))
            dist.all_reduce(batch)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, reduction="sum")
            (loss * args.nproc / batch).backward()  # DDP divides by the ranks
            optimizer.step()
            total += torch.tensor([loss.detach(), len(labels)])
        dist.all_reduce(total)
        accuracy = evaluate(net, test_set)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.6f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--data", default="data")
    parser.add_argument("--fraction", type=float, default=0.25)
    args = parser.parse_args()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # on a free port
    mp.spawn(train, args=(store.port, args), nprocs=args.nproc)
