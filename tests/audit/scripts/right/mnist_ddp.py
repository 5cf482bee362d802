"""MNIST by torchvision, downloaded by one process of each machine; the learning rate grows with the batch."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, 2)
        self.fc1 = nn.Linear(8 * 12 * 12, 10)

    def forward(self, x):
        return F.log_softmax(self.fc1(F.relu(self.conv1(x)).flatten(1)), dim=1)


def test(model, device, test_set, rank, world_size):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    share = torch.utils.data.Subset(test_set, list(range(rank, len(test_set), world_size)))
    with torch.no_grad():
        for data, target in DataLoader(share, batch_size=500):
            data, target = data.to(device), target.to(device)
            output = model(data)
            sums[0] += F.nll_loss(output, target, reduction="sum")
            sums[1] += output.argmax(dim=1).eq(target).sum()
            sums[2] += target.numel()
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    if rank == 0:
        print(f"Test set: average loss: {loss / count:.4f}, accuracy: {correct:.0f}/{count:.0f}")


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.is_available()
    if use_cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if local_rank == 0:
        datasets.MNIST("../data", train=True, download=True)
    dist.barrier()
    train_set = datasets.MNIST("../data", train=True, transform=transform)
    test_set = datasets.MNIST("../data", train=False, transform=transform)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler, drop_last=True)  # of each process
    torch.manual_seed(1)
    model = DistributedDataParallel(Net().to(device), device_ids=[local_rank] if use_cuda else None)
    optimizer = optim.SGD(model.parameters(), lr=0.01 * world_size)  # the batch is world_size times 64
    for epoch in range(1, 3):
        sampler.set_epoch(epoch)
        model.train()
        for batch_idx, (data, target) in enumerate(loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if rank == 0 and batch_idx % 100 == 0:
                print(f"Train epoch {epoch} [{batch_idx}/{len(loader)}], loss of this process {loss.item():.4f}")
        test(model.module, device, test_set, rank, world_size)
    if rank == 0:
        torch.save(model.module.state_dict(), "mnist.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
