# expect: group-before-init line 117 or 62 or 118
"""Image classifier for the cluster; `srun python slurm_click.py train ...` starts one task per GPU.

The batch script sets --ntasks-per-node and exports MASTER_ADDR (first host of the allocation).
"""
import contextlib
import os
from pathlib import Path

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models
from torchvision import transforms as tf


class Place:
    """Where this process is in the allocation."""

    def __init__(self, env=os.environ):
        self.rank = int(env['SLURM_PROCID'])
        self.world = int(env['SLURM_NTASKS'])
        self.local = int(env['SLURM_LOCALID'])
        self.tasks_here = int(env['SLURM_NTASKS_PER_NODE'])
        self.cpus_here = int(env['SLURM_CPUS_ON_NODE'])
        self.port = 20000 + int(env['SLURM_JOB_ID']) % 20000
        self.host = env['MASTER_ADDR']

    @property
    def device(self):
        return torch.device('cuda', self.local)

    @property
    def loader_workers(self):
        return max(1, self.cpus_here // self.tasks_here - 1)


@contextlib.contextmanager
def process_group(place):
    torch.cuda.set_device(place.device)
    dist.init_process_group('nccl', init_method=f'tcp://{place.host}:{place.port}',
                            rank=place.rank, world_size=place.world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def pipeline(size, augment):
    geometry = ([tf.RandomResizedCrop(size), tf.RandomHorizontalFlip()] if augment
                else [tf.Resize(int(size * 1.15)), tf.CenterCrop(size)])
    return tf.Compose(geometry + [tf.ToTensor(), tf.Normalize((0.48, 0.46, 0.41), (0.23, 0.22, 0.23))])


def feeds(data, size, batch, seed, place):
    train = datasets.ImageFolder(data / 'train', pipeline(size, True))
    held_out = datasets.ImageFolder(data / 'val', pipeline(size, False))
    sampler = DistributedSampler(train, shuffle=True, seed=seed)
    training = DataLoader(train, batch_size=batch // place.world, sampler=sampler, drop_last=True,
                          num_workers=place.loader_workers, pin_memory=True, persistent_workers=True)
    mine = Subset(held_out, range(place.rank, len(held_out), place.world))
    checking = DataLoader(mine, batch_size=128, num_workers=place.loader_workers, pin_memory=True)
    return training, checking, len(train.classes)


def one_epoch(model, training, optimizer, device):
    model.train()
    acc = torch.zeros(2, device=device)
    for x, y in training:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        acc += torch.stack((loss.detach() * len(y), torch.full_like(loss.detach(), len(y))))
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


@torch.inference_mode()
def check(net, checking, device):
    net.eval()
    good = torch.zeros((), device=device)
    count = torch.zeros((), device=device)
    for x, y in checking:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        good += (net(x).argmax(-1) == y).sum()
        count += len(y)
    for number in (good, count):
        dist.all_reduce(number)
    return (good / count).item()


@click.group()
def cli():
    pass


@cli.command()
@click.option('--data', type=click.Path(exists=True, path_type=Path), required=True)
@click.option('--out', type=click.Path(path_type=Path), required=True)
@click.option('--batch', default=1024, help='Images per step over all tasks.')
@click.option('--lr', default=0.4, help='Learning rate for --batch images.')
@click.option('--epochs', default=60)
@click.option('--size', default=176)
@click.option('--seed', default=1234)
def train(data, out, batch, lr, epochs, size, seed):
    """Train from scratch, continuing from OUT/last.pt where there is one."""
    place = Place()
    if batch % place.world:
        raise click.BadParameter(f'--batch is not a multiple of {place.world}')
    training, checking, classes = feeds(data, size, batch, seed, place)
    with process_group(place):
        torch.manual_seed(seed)
        net = nn.SyncBatchNorm.convert_sync_batchnorm(models.resnet34(weights=None, num_classes=classes))
        net.to(place.device)
        model = DDP(net, device_ids=[place.local])
        torch.manual_seed(seed + 1 + place.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=5e-5)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
        begin = 0
        last = out / 'last.pt'
        if last.exists():
            stored = torch.load(last, map_location=place.device, weights_only=True)
            net.load_state_dict(stored['net'])
            optimizer.load_state_dict(stored['optimizer'])
            scheduler.load_state_dict(stored['scheduler'])
            begin = stored['epochs_done']
        for epoch in range(begin, epochs):
            training.sampler.set_epoch(epoch)
            loss = one_epoch(model, training, optimizer, place.device)
            scheduler.step()
            accuracy = check(net, checking, place.device)
            if place.rank == 0:
                click.echo(f'{epoch + 1}/{epochs} loss={loss:.4f} accuracy={accuracy:.4f}')
                out.mkdir(parents=True, exist_ok=True)
                torch.save({'net': net.state_dict(), 'optimizer': optimizer.state_dict(),
                            'scheduler': scheduler.state_dict(), 'epochs_done': epoch + 1}, last)


if __name__ == '__main__':
    cli()
