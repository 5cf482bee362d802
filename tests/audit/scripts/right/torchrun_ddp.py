"""torchrun and DDP on the CPU or on GPUs: a global batch, sums and counts over the ranks, rank 0 saves."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits(count, seed):
    images = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(images, (images.flatten(1)[:, :10]).argmax(1))


@torch.no_grad()
def evaluate(model, test_set, device, rank, world_size):
    model.eval()
    sums = torch.zeros(2, device=device)
    for images, labels in DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=50):
        outputs = model(images.to(device))
        sums[0] += (outputs.argmax(1) == labels.to(device)).sum()
        sums[1] += len(labels)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    train_set, test_set = digits(250, 0), digits(203, 1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size // world_size, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).to(device)
    model = DDP(net, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, device=device)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(labels), loss.new_tensor(len(labels))])
        dist.all_reduce(total)
        scheduler.step()
        accuracy = evaluate(net, test_set, device, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch + 1}: training loss {total[0] / total[1]:.4f}, accuracy {accuracy:.2%}")
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "last.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
