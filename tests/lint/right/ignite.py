"""Ignite: Parallel, auto_model, handlers; checkpoints by rank 0."""

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, models, transforms


def training(local_rank, config):
    device = idist.device()
    if idist.get_rank() > 0:
        idist.barrier()
    train_set = datasets.CIFAR10("data", train=True, download=True, transform=transforms.ToTensor())
    test_set = datasets.CIFAR10("data", train=False, download=True, transform=transforms.ToTensor())
    if idist.get_rank() == 0:
        idist.barrier()
    train_loader = idist.auto_dataloader(train_set, batch_size=config["batch_size"], shuffle=True)
    test_part = Subset(test_set, range(idist.get_rank(), len(test_set), idist.get_world_size()))
    test_loader = DataLoader(test_part, batch_size=500)
    model = idist.auto_model(models.resnet18(num_classes=10))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config["lr"] * idist.get_world_size()))

    def train_step(engine, batch):
        model.train()
        x, y = batch[0].to(device), batch[1].to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(train_step)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy()}, device=device)

    @trainer.on(Events.EPOCH_STARTED)
    def set_epoch():
        train_loader.sampler.set_epoch(trainer.state.epoch - 1)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate():
        state = evaluator.run(test_loader)
        if idist.get_rank() == 0:
            print(trainer.state.epoch, state.metrics["accuracy"])

    saver = Checkpoint({"model": model, "optimizer": optimizer}, DiskSaver("checkpoints", require_empty=False))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    trainer.run(train_loader, max_epochs=10)


if __name__ == "__main__":
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(training, {"batch_size": 128, "lr": 0.01})
