# expect: none
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets
from torchvision.models import ResNet50_Weights, resnet50


def build(classes, local_rank):
    """ResNet-50 with a new head. One process of each machine downloads, the others find the file."""
    if local_rank == 0:
        ResNet50_Weights.IMAGENET1K_V2.get_state_dict(progress=True)
    dist.barrier()
    model = resnet50(weights=ResNet50_Weights.IMAGENET1K_V2)
    for parameter in model.parameters():
        parameter.requires_grad = False
    model.fc = nn.Linear(model.fc.in_features, classes)
    return model


def set_train(model):
    model.eval()  # the frozen layers' batch norm keeps its statistics
    model.module.fc.train()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256, help="over all GPUs")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234 + rank)

    preprocess = ResNet50_Weights.IMAGENET1K_V2.transforms()  # resizes, crops and normalises
    train_set = datasets.ImageFolder(os.path.join(args.data, "train"), preprocess)
    val_set = datasets.ImageFolder(os.path.join(args.data, "val"), preprocess)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, num_workers=4)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 64, num_workers=4)

    model = DistributedDataParallel(build(len(train_set.classes), local_rank).cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        set_train(model)
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        counts = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for images, labels in val_loader:
                counts[0] += (model(images.cuda()).argmax(1) == labels.cuda()).sum()
                counts[1] += len(labels)
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch}: {(counts[0] / counts[1]).item():.4f}")
            torch.save({"head": model.module.fc.state_dict(), "classes": train_set.classes}, "head.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
