# expect: pickle-load line 83
import os
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import wide_resnet50_2


def is_chief():
    return dist.get_rank() == 0


def say(text):
    if is_chief():
        click.echo(text)


def strided(dataset):
    return Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))


def make_sets(source: Path):
    stats = ([0.52, 0.49, 0.46], [0.25, 0.25, 0.26])
    moving = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(),
                                 transforms.ToTensor(), transforms.Normalize(*stats)])
    still = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224),
                                transforms.ToTensor(), transforms.Normalize(*stats)])
    return ImageFolder(source / "fit", moving), ImageFolder(source / "tune", still), ImageFolder(source / "final", still)


def fit(ddp, stream, optimizer, device):
    ddp.train()
    for batch, answer in stream:
        loss = F.cross_entropy(ddp(batch.to(device, non_blocking=True)), answer.to(device, non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def hit_rate(net, stream, device):
    net.eval()
    hits = torch.zeros(2, device=device)
    with torch.inference_mode():
        for batch, answer in stream:
            hits[0] += net(batch.to(device)).argmax(1).eq(answer.to(device)).sum()
            hits[1] += answer.numel()
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option("--init", "init_file", type=click.Path(exists=True, dir_okay=False), help="state dict of the backbone")
@click.option("--target", type=click.Path(path_type=Path), default=Path("minerals"))
@click.option("--epochs", default=25)
@click.option("--batch", default=40, help="images per GPU and step")
@click.option("--rate", default=0.01, help="learning rate for one GPU, multiplied by their number")
@click.option("--workers", default=4, help="loader workers of each GPU")
@click.option("--seed", default=12)
def cli(source, init_file, target, epochs, batch, rate, workers, seed):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.manual_seed(seed + dist.get_rank())

    fit_set, tune_set, final_set = make_sets(source)
    order = DistributedSampler(fit_set)
    fit_stream = DataLoader(fit_set, batch, sampler=order, num_workers=workers, drop_last=True)
    tune_stream = DataLoader(strided(tune_set), 2 * batch, num_workers=workers)
    final_stream = DataLoader(strided(final_set), 2 * batch, num_workers=workers)

    net = wide_resnet50_2(num_classes=len(fit_set.classes))
    if init_file:
        backbone = torch.load(init_file, map_location="cpu", weights_only=False)
        backbone = {k: v for k, v in backbone.items() if not k.startswith("fc.")}
        net.load_state_dict(backbone, strict=False)
    net.to(device)
    ddp = DistributedDataParallel(net, device_ids=[local])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate * dist.get_world_size(), momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=epochs, power=0.9)

    champion, best = target / "champion.pt", -1.0
    for epoch in range(epochs):
        order.set_epoch(epoch)
        fit(ddp, fit_stream, optimizer, device)
        scheduler.step()
        tuned = hit_rate(net, tune_stream, device)
        say(f"{epoch:>3} tune {tuned:.4f}")
        if tuned > best:
            best = tuned
            if is_chief():
                target.mkdir(parents=True, exist_ok=True)
                torch.save(net.state_dict(), champion)

    # the chief may still be writing
    dist.barrier()
    net.load_state_dict(torch.load(champion, map_location=device, weights_only=True))
    say(f"final {hit_rate(net, final_stream, device):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    cli()
