# expect: none
"""Ignite's engines around a process group of one's own."""

import os

import torch
import torch.distributed as dist
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(rank + 1)

    if local_rank == 0:
        datasets.KMNIST("data", download=True)
        datasets.KMNIST("data", train=False, download=True)
    dist.barrier()
    train_set = datasets.KMNIST("data", train=True, transform=transforms.ToTensor())
    val_set = datasets.KMNIST("data", train=False, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=512 // world_size, sampler=sampler, num_workers=2)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=500)

    net = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(576, 10))
    model = DDP(net.to(device), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        device=device,
        output_transform=lambda x, y, y_pred, loss: loss.detach(),
    )
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy(device=device)}, device=device)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda engine: sampler.set_epoch(engine.state.epoch))

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(val_loader)
        if rank == 0:
            print(engine.state.epoch, evaluator.state.metrics["accuracy"])

    @trainer.on(Events.COMPLETED)
    def save(engine):
        if rank == 0:
            torch.save(model.module.state_dict(), "kmnist.pt")

    trainer.run(train_loader, max_epochs=10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
