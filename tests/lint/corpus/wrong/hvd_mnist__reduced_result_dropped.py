# expect: reduced-result-dropped line 51 or 52
"""horovodrun -np 4 python hvd_mnist.py"""

import argparse

import horovod.torch as hvd
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(320, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc(self.drop(x.view(-1, 320)))


def train(model, loader, sampler, optimizer, epoch):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    counts = torch.zeros(3, device="cuda")
    with torch.no_grad():
        for data, target in loader:
            data, target = data.cuda(), target.cuda()
            output = model(data)
            counts[0] += F.cross_entropy(output, target, reduction="sum")
            counts[1] += (output.argmax(1) == target).sum()
            counts[2] += len(target)
    hvd.allreduce(counts, op=hvd.Sum, name="test")
    loss, correct, seen = counts.tolist()
    if hvd.rank() == 0:
        print(f"test: loss {loss / seen:.4f}, accuracy {correct / seen:.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64, help="per process")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01, help="of one process")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    torch.manual_seed(args.seed + hvd.rank())

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if hvd.local_rank() == 0:
        datasets.MNIST("data", download=True)
    hvd.barrier()
    train_set = datasets.MNIST("data", train=True, transform=transform)
    test_set = datasets.MNIST("data", train=False, transform=transform)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(Subset(test_set, range(hvd.rank(), len(test_set), hvd.size())), batch_size=1000)

    model = Net().cuda()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, sampler, optimizer, epoch)
        test(model, test_loader)
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "mnist.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main()
