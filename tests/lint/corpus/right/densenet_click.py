# expect: none
import functools
import os

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets, models, transforms

try:
    import wandb
except ImportError:
    wandb = None


def distributed(fn):
    """Runs fn with a process group around it."""

    @functools.wraps(fn)
    def inner(*args, **kwargs):
        local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        try:
            return fn(*args, local_rank=local_rank, **kwargs)
        finally:
            dist.destroy_process_group()

    return inner


def rank_zero(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        if dist.get_rank() == 0:
            return fn(*args, **kwargs)
        return None

    return inner


@rank_zero
def report(epoch, numbers):
    print(epoch, " ".join(f"{k}={v:.4f}" for k, v in numbers.items()))
    if wandb is not None and wandb.run is not None:
        wandb.log({**numbers, "epoch": epoch})


@rank_zero
def keep(path, model, numbers):
    torch.save({"weights": model.state_dict(), **numbers}, path)


@rank_zero
def open_wandb(project, config):
    if wandb is not None and project:
        wandb.init(project=project, config=config)


def epoch_of_training(ddp, loader, opt, device):
    ddp.train()
    loss_sum = torch.zeros((), device=device)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss_sum += loss.detach()
    dist.all_reduce(loss_sum, op=dist.ReduceOp.AVG)
    return loss_sum.item() / len(loader)


def accuracy(model, loader, device):
    model.eval()
    correct = torch.zeros(1, device=device)
    n = torch.zeros(1, device=device)
    with torch.no_grad():
        for x, y in loader:
            logits = model(x.to(device))
            correct += (logits.argmax(1) == y.to(device)).sum()
            n += y.size(0)
    dist.all_reduce(correct)
    dist.all_reduce(n)
    return (correct / n).item()


@click.command()
@click.option("--data", type=click.Path(exists=True), required=True)
@click.option("--save", type=click.Path(), required=True)
@click.option("--batch", default=256, show_default=True, help="for all GPUs together")
@click.option("--lr", default=0.1, show_default=True, help="for the whole batch")
@click.option("--epochs", default=100, show_default=True)
@click.option("--workers", default=4, show_default=True, help="for each GPU")
@click.option("--project", default="", help="wandb project")
@distributed
def cli(data, save, batch, lr, epochs, workers, project, local_rank):
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(rank)
    open_wandb(project, dict(batch=batch, lr=lr, epochs=epochs))

    norm = transforms.Normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    aug = transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
                              transforms.ToTensor(), norm])
    train = datasets.SVHN(data, split="train", transform=aug)
    test = datasets.SVHN(data, split="test", transform=transforms.Compose([transforms.ToTensor(), norm]))
    sampler = DistributedSampler(train, num_replicas=world, rank=rank)
    per_gpu = batch // world
    train_dl = DataLoader(train, per_gpu, sampler=sampler, num_workers=workers, drop_last=True, pin_memory=True)
    test_dl = DataLoader(Subset(test, range(rank, len(test), world)), per_gpu, num_workers=workers)

    model = models.densenet121(num_classes=10)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(device)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank], output_device=local_rank)
    opt = torch.optim.SGD(ddp.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=lr, epochs=epochs, steps_per_epoch=1)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss = epoch_of_training(ddp, train_dl, opt, device)
        sched.step()
        numbers = {"loss": loss, "accuracy": accuracy(model, test_dl, device)}
        report(epoch, numbers)
        keep(save, model, numbers)


if __name__ == "__main__":
    cli()
