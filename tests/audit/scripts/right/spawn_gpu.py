"""mp.spawn, a process per GPU, a meeting port that is free; rank 0 evaluates the whole test set by itself."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 64
EPOCHS = 2


class Shapes(Dataset):
    """Pictures with one bright quarter; the label says which."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (count,), generator=generator)
        self.images = torch.rand(count, 3, 8, 8, generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            top, left = 4 * (label // 2), 4 * (label % 2)
            image[:, top : top + 4, left : left + 4] += 1

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def worker(rank, world_size, port):
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world_size)
    train_set, test_set = Shapes(256, 0), Shapes(200, 1)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(train_set, batch_size=BATCH // world_size, sampler=sampler, pin_memory=True)
    torch.manual_seed(42)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)).cuda(rank)
    model = DistributedDataParallel(net, device_ids=[rank])
    criterion = nn.CrossEntropyLoss().cuda(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(loader):
            images = images.cuda(rank, non_blocking=True)
            labels = labels.cuda(rank, non_blocking=True)
            loss = criterion(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 50 == 0:
                print(f"epoch {epoch} step {step}: rank 0's loss {loss.item():.4f}")
        if rank == 0:
            net.eval()
            right = 0
            with torch.no_grad():
                for images, labels in DataLoader(test_set, batch_size=100):
                    right += (net(images.cuda(rank)).argmax(1).cpu() == labels).sum().item()
            print(f"epoch {epoch}: accuracy {right / len(test_set):.2%}")
        dist.barrier()
    if rank == 0:
        torch.save(net.state_dict(), "shapes.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    gpus = torch.cuda.device_count()
    mp.spawn(worker, args=(gpus, free_port()), nprocs=gpus)
