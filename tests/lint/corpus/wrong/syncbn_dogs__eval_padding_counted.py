# expect: eval-padding-counted line 46 or 69 or 70 or 71
"""Dog breeds, fine-tuned from ImageNet weights in two stages: the head first, then all of it."""
import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms
from torchvision.models import ResNet50_Weights, resnet50


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=timedelta(minutes=20))
    return dist.get_rank(), dist.get_world_size(), torch.device("cuda", local_rank)


def backbone(weights_file, n_breeds):
    """The weights are fetched beforehand (`python -c "from torchvision..."`), the nodes have no network."""
    net = resnet50()
    net.load_state_dict(torch.load(weights_file, map_location="cpu", weights_only=True))
    net.fc = nn.Sequential(nn.Dropout(0.3), nn.Linear(net.fc.in_features, n_breeds))
    return net


def wrap(net, device):
    net = SyncBatchNorm.convert_sync_batchnorm(net)
    net = net.to(device)
    return DistributedDataParallel(net, device_ids=[device.index])


def make_loaders(root, per_gpu, workers):
    pre = ResNet50_Weights.IMAGENET1K_V2.transforms()
    norm = transforms.Normalize(pre.mean, pre.std)
    train_set = datasets.ImageFolder(f"{root}/train", transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), norm]))
    valid_set = datasets.ImageFolder(f"{root}/valid", pre)
    train_loader = DataLoader(train_set, per_gpu, sampler=DistributedSampler(train_set), drop_last=True,
                              num_workers=workers, pin_memory=True)
    valid_loader = DataLoader(valid_set, per_gpu, sampler=DistributedSampler(valid_set, shuffle=False),
                              num_workers=workers, pin_memory=True)
    return train_loader, valid_loader, len(train_set.classes)


def fit(model, optimizer, loader, epoch, device, criterion):
    loader.sampler.set_epoch(epoch)
    model.train()
    for image, breed in loader:
        image, breed = image.to(device, non_blocking=True), breed.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        criterion(model(image), breed).backward()
        optimizer.step()


@torch.no_grad()
def check(model, loader, device):
    net = model.module
    net.eval()
    counter = torch.zeros(2, device=device)
    for image, breed in loader:
        breed = breed.to(device)
        counter[0] += (net(image.to(device)).argmax(dim=1) == breed).sum()
        counter[1] += breed.numel()
    dist.all_reduce(counter)
    return counter[0].item() / counter[1].item()


def stage(name, net, device, loaders, epochs, lr, first_epoch, rank):
    """Trains what of the network wants gradients; a wrapper of its own for each stage."""
    train_loader, valid_loader = loaders
    model = wrap(net, device)
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(wanted, lr=lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in range(first_epoch, first_epoch + epochs):
        fit(model, optimizer, train_loader, epoch, device, criterion)
        accuracy = check(model, valid_loader, device)
        if rank == 0:
            print(f"{name} epoch {epoch}: valid accuracy {accuracy:.4f}", flush=True)
    return model.module


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--root", required=True)
    p.add_argument("--weights", required=True, help="state dict of ResNet-50")
    p.add_argument("--save-to", required=True)
    p.add_argument("--head-epochs", type=int, default=3)
    p.add_argument("--full-epochs", type=int, default=20)
    p.add_argument("--per-gpu", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.01, help="for 64 images a step; scaled to the real number")
    p.add_argument("--workers-per-gpu", type=int, default=6)
    args = p.parse_args()

    rank, world, device = setup()
    torch.manual_seed(505 + rank)
    *loaders, n_breeds = make_loaders(args.root, args.per_gpu, args.workers_per_gpu)
    lr = args.lr * args.per_gpu * world / 64

    net = backbone(args.weights, n_breeds)
    for name, parameter in net.named_parameters():
        parameter.requires_grad = name.startswith("fc.")
    net = stage("head", net, device, loaders, args.head_epochs, lr, 0, rank)
    net.requires_grad_(True)
    net = stage("full", net, device, loaders, args.full_epochs, lr * 0.1, args.head_epochs, rank)

    if rank == 0:
        torch.save(net.state_dict(), args.save_to)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
