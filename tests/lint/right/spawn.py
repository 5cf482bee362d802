"""DDP started by mp.spawn on a free port; the data is fetched before the processes start."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

BATCH = 128
EPOCHS = 10


def run(rank, world_size, port):
    store = dist.TCPStore("localhost", port)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    train_set = torchvision.datasets.CIFAR10("data", train=True, transform=torchvision.transforms.ToTensor())
    test_set = torchvision.datasets.CIFAR10("data", train=False, transform=torchvision.transforms.ToTensor())
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=BATCH // world_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=500)
    model = DDP(torchvision.models.resnet18(num_classes=10).cuda(rank), device_ids=[rank])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(loader):
            images, labels = images.cuda(rank), labels.cuda(rank)
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 100 == 0 and rank == 0:
                print(f"epoch {epoch} step {step}: rank 0's loss {loss.item():.4f}")
        if rank == 0:
            model.eval()
            correct = 0
            with torch.no_grad():
                for images, labels in test_loader:
                    outputs = model.module(images.cuda(rank))
                    correct += (outputs.argmax(1).cpu() == labels).sum().item()
            print(f"epoch {epoch}: accuracy {correct / len(test_set):.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


def main():
    torchvision.datasets.CIFAR10("data", download=True)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    world_size = torch.cuda.device_count()
    mp.spawn(run, args=(world_size, store.port), nprocs=world_size)


if __name__ == "__main__":
    main()
