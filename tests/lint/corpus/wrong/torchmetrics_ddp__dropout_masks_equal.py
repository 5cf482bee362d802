# expect: dropout-masks-equal line 50
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchvision import datasets, models, transforms


def build_model(classes, device):
    model = models.mobilenet_v2(num_classes=classes, norm_layer=partial(nn.SyncBatchNorm, eps=1e-5))
    return DistributedDataParallel(model.to(device), device_ids=[device.index])


def epoch_of_training(model, loader, optimizer, device):
    model.train()
    mean = MeanMetric().to(device)
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        mean.update(loss.detach(), weight=len(labels))
    return mean.compute()  # over all ranks


def epoch_of_validation(model, loader, metrics, device):
    model.eval()
    metrics.reset()
    with torch.no_grad():
        for images, labels in loader:
            metrics.update(model(images.to(device)), labels.to(device))
    return {name: value.item() for name, value in metrics.compute().items()}


@record
def main():
    dist.init_process_group(backend="nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(2)

    root, classes = os.environ["PETS"], 37
    train_tf = transforms.Compose([transforms.RandomResizedCrop(192), transforms.ToTensor()])
    val_tf = transforms.Compose([transforms.Resize(224), transforms.CenterCrop(192), transforms.ToTensor()])
    train_set = datasets.OxfordIIITPet(root, "trainval", transform=train_tf)
    val_set = datasets.OxfordIIITPet(root, "test", transform=val_tf)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    train_loader = DataLoader(train_set, 256 // world_size, sampler=sampler, num_workers=4)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), 128, num_workers=4)

    model = build_model(classes, device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, weight_decay=4e-5)
    metrics = MetricCollection(
        {"top1": MulticlassAccuracy(classes, average="micro"), "f1": MulticlassF1Score(classes)}
    ).to(device)
    for epoch in range(40):
        sampler.set_epoch(epoch)
        loss = epoch_of_training(model, train_loader, optimizer, device)
        values = epoch_of_validation(model, val_loader, metrics, device)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} top-1 {values['top1']:.4f} F1 {values['f1']:.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "pets.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
