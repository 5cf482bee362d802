"""Right training scripts, as people write them. A wrong script of the tests is one of these with a line changed."""

DDP = """\
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, random_split
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


def is_main_process():
    return dist.get_rank() == 0


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    total = torch.zeros(2, device=device)
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach() * len(labels), torch.tensor(len(labels), device=device)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def evaluate(model, loader, device):
    model.eval()
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels in loader:
            sums[0] += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
            sums[1] += len(labels)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--nodes", type=int, default=1, help="num_nodes of the job")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    if rank == 0:
        datasets.CIFAR10("data", download=True)
    dist.barrier()
    train_set = datasets.CIFAR10("data", train=True, transform=transforms.ToTensor())
    test_set = datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))
    model = models.resnet18().to(device)
    model = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * dist.get_world_size(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    start, best = 0, 0.0
    if os.path.exists("checkpoint.pt"):
        checkpoint = torch.load("checkpoint.pt", map_location="cpu")
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        start = checkpoint["epoch"] + 1
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, optimizer, device)
        scheduler.step(loss)
        accuracy = evaluate(model, test_loader, device)
        if is_main_process():
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "epoch": epoch,
            }
            torch.save(state, "checkpoint.pt")
        best = max(best, accuracy)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

SPAWN = """\
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


class Trainer:
    def __init__(self, model, loader, optimizer, rank):
        self.rank = rank
        self.model = DDP(model.to(rank), device_ids=[rank])
        self.loader = loader
        self.optimizer = optimizer

    def run_batch(self, images, labels):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for images, labels in self.loader:
            self.run_batch(images.to(self.rank), labels.to(self.rank))

    def save(self, epoch):
        torch.save(self.model.module.state_dict(), "weights.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)
            if self.rank == 0:
                self.save(epoch)


def run(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    dataset = datasets.MNIST("data", transform=transforms.ToTensor())
    loader = DataLoader(dataset, batch_size=64 // world_size, sampler=DistributedSampler(dataset))
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    trainer = Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    trainer.train(10)
    dist.destroy_process_group()


if __name__ == "__main__":
    datasets.MNIST("data", download=True)
    world_size = torch.cuda.device_count()
    mp.spawn(run, args=(world_size,), nprocs=world_size)
"""

ACCUMULATION = """\
import os

import torch
import torch.distributed as dist
from contextlib import nullcontext
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

K = 4


def train(model, loader, optimizer, scaler):
    for i, (images, labels) in enumerate(loader):
        update = (i + 1) % K == 0 or i + 1 == len(loader)
        with nullcontext() if update else model.no_sync():
            with torch.autocast("cuda"):
                loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            loss = loss / K
            scaler.scale(loss).backward()
        if update:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    dataset = datasets.ImageFolder("data", transforms.ToTensor())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, scaler)
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "weights.pt")


main()
"""

ONE_PROCESS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models, transforms


def train(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    return correct / len(loader.dataset)


train_set = datasets.ImageFolder("data/train", transforms.ToTensor())
test_set = datasets.ImageFolder("data/test", transforms.ToTensor())
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
test_loader = DataLoader(test_set, batch_size=64)
model = models.resnet18()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(90):
    train(model, train_loader, optimizer)
    print(test(model, test_loader))
torch.save(model.state_dict(), "weights.pt")
"""

FLAT = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
train_set = datasets.ImageFolder("data/train", transforms.ToTensor())
test_set = datasets.ImageFolder("data/test", transforms.ToTensor())
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
test_loader = DataLoader(test_set, batch_size=64, sampler=DistributedSampler(test_set, shuffle=False))
model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(10):
    sampler.set_epoch(epoch)
    model.train()
    total = torch.zeros(1).cuda()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    plateau.step(total.item())
    model.eval()
    correct = torch.zeros(1).cuda()
    for images, labels in test_loader:
        with torch.no_grad():
            correct += (model(images.cuda()).argmax(1) == labels.cuda()).sum()
    dist.all_reduce(correct)
    if dist.get_rank() == 0:
        print(epoch, total.item(), correct.item() / len(test_set))
        torch.save(model.module.state_dict(), "weights.pt")
dist.destroy_process_group()
"""

HOROVOD = """\
import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms

hvd.init()
torch.cuda.set_device(hvd.local_rank())
train_set = datasets.ImageFolder("data/train", transforms.ToTensor())
test_set = datasets.ImageFolder("data/test", transforms.ToTensor())
sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_set, batch_size=64, sampler=sampler)
test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def test():
    model.eval()
    correct = torch.zeros(1)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.cuda()).argmax(1) == labels.cuda()).sum().cpu()
    correct = hvd.allreduce(correct, op=hvd.Sum)
    return correct.item() / len(test_set)


for epoch in range(10):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
    accuracy = test()
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "weights.pt")
"""

ACCELERATE = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def main():
    accelerator = Accelerator()
    train_set = datasets.ImageFolder("data/train", transforms.ToTensor())
    test_set = datasets.ImageFolder("data/test", transforms.ToTensor())
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Dropout(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for epoch in range(10):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        model.eval()
        correct = total = 0
        for images, labels in test_loader:
            with torch.no_grad():
                predictions = model(images).argmax(1)
            predictions, labels = accelerator.gather_for_metrics((predictions, labels))
            correct += (predictions == labels).sum().item()
            total += len(labels)
        accelerator.print(correct / total)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")


main()
"""

LIGHTNING = """\
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


train_set = datasets.ImageFolder("data/train", transforms.ToTensor())
trainer = L.Trainer(devices=4, strategy="ddp", max_epochs=10)
trainer.fit(Net(), DataLoader(train_set, batch_size=64, shuffle=True))
"""

BASES = {
    name: text for name, text in list(globals().items()) if name.isupper() and isinstance(text, str) and name != "BASES"
}
