# expect: no-set-epoch line 85 or 29 or 30 or 45 or 60
"""EuroSAT land use with PyTorch-Ignite.

torchrun --nproc_per_node=2 ignite_eurosat.py /data/eurosat --output /runs/eurosat/$RUN
"""
import click
import ignite.distributed as idist
import torch
import torch.nn as nn
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.metrics import Accuracy, Loss
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, RandomVerticalFlip, ToTensor

SCALE = Normalize((0.344, 0.380, 0.408), (0.203, 0.137, 0.116))


def make_data(root, batch, seed):
    augmented = ImageFolder(root, Compose([RandomHorizontalFlip(), RandomVerticalFlip(), ToTensor(), SCALE]))
    plain = ImageFolder(root, Compose([ToTensor(), SCALE]))
    order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = int(0.8 * len(order))
    train = Subset(augmented, order[:cut])
    held_out = Subset(plain, order[cut:][idist.get_rank()::idist.get_world_size()])
    sampler = DistributedSampler(train, idist.get_world_size(), idist.get_rank(), seed=seed, drop_last=True)
    return (DataLoader(train, batch, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True),
            DataLoader(held_out, batch, num_workers=4, pin_memory=True),
            len(plain.classes))


def make_trainer(model, optimizer, criterion, device):
    def update(engine, batch):
        model.train()
        x, y = (t.to(device, non_blocking=True) for t in batch)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Engine(update)


def training(local_rank, root, output, epochs, batch, lr, resume):
    device = idist.device()
    torch.manual_seed(808 + idist.get_rank())
    train, held_out, classes = make_data(root, batch, seed=808)

    net = models.efficientnet_b0(num_classes=classes)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    model = idist.auto_model(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr * idist.get_world_size())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    criterion = nn.CrossEntropyLoss()

    trainer = make_trainer(model, optimizer, criterion, device)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: schedule.step())
    evaluator = create_supervised_evaluator(
        net, metrics={"accuracy": Accuracy(device=device), "nll": Loss(criterion, device=device)}, device=device)

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        evaluator.run(held_out)
        if idist.get_rank() == 0:
            m = evaluator.state.metrics
            print(f"{engine.state.epoch}: accuracy {m['accuracy']:.4f} nll {m['nll']:.4f}")

    everything = {"trainer": trainer, "model": net, "optimizer": optimizer, "schedule": schedule}
    latest = Checkpoint(everything, DiskSaver(output, require_empty=False), n_saved=2,
                        global_step_transform=global_step_from_engine(trainer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, latest)
    best = Checkpoint({"model": net}, DiskSaver(output, require_empty=False), n_saved=1, filename_prefix="best",
                      score_function=lambda e: e.state.metrics["accuracy"], score_name="accuracy",
                      global_step_transform=global_step_from_engine(trainer))
    evaluator.add_event_handler(Events.COMPLETED, best)

    if resume:
        Checkpoint.load_objects(everything, torch.load(resume, map_location=device, weights_only=True))
    if idist.get_rank() == 0:
        ProgressBar().attach(trainer)
    trainer.run(train, max_epochs=epochs)


@click.command()
@click.argument("root", type=click.Path(exists=True, file_okay=False))
@click.option("--output", required=True)
@click.option("--epochs", default=40)
@click.option("--batch", default=64, help="per process")
@click.option("--lr", default=2e-4, help="for one process, multiplied by their number")
@click.option("--resume", default=None, help="checkpoint to go on from")
def cli(root, output, epochs, batch, lr, resume):
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(training, root, output, epochs, batch, lr, resume)


if __name__ == "__main__":
    cli()
