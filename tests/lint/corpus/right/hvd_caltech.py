# expect: none
# Caltech-256 with Horovod:  horovodrun -np 8 python hvd_caltech.py --train-dir ... --val-dir ... --log-dir ...
import argparse
import os

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms
from tqdm import tqdm

parser = argparse.ArgumentParser(description="Caltech-256, Horovod")
parser.add_argument("--train-dir", required=True)
parser.add_argument("--val-dir", required=True)
parser.add_argument("--log-dir", required=True, help="folder of this run")
parser.add_argument("--batch-size", type=int, default=32, help="training batch of each process")
parser.add_argument("--val-batch-size", type=int, default=64, help="validation batch of each process")
parser.add_argument("--base-lr", type=float, default=0.0125, help="learning rate of a single GPU")
parser.add_argument("--warmup-epochs", type=int, default=5)
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--wd", type=float, default=5e-5)
parser.add_argument("--seed", type=int, default=42)


class Sum:
    """A sum over all the processes."""

    def __init__(self, name, device):
        self.name = name
        self.value = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, amount, n):
        self.value[0] += amount
        self.value[1] += n

    def mean(self):
        everywhere = hvd.allreduce(self.value, op=hvd.Sum, name=self.name)
        return (everywhere[0] / everywhere[1]).item()


def lr_factor(epoch, warmup):
    if epoch < warmup:
        # from the single GPU's rate up to that of all
        return (1 + epoch * (hvd.size() - 1) / warmup) / hvd.size()
    return 0.1 ** sum(epoch >= e for e in (30, 45, 55))


def train(epoch, model, optimizer, loader, device):
    model.train()
    loader.sampler.set_epoch(epoch)
    loss_sum = Sum("train_loss", device)
    with tqdm(loader, desc=f"train {epoch}", disable=hvd.rank() != 0) as bar:
        for data, target in bar:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            loss_sum.add(loss.detach() * len(target), len(target))
    return loss_sum.mean()


def validate(model, loader, device):
    model.eval()
    accuracy = Sum("val_accuracy", device)
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            accuracy.add((model(data).argmax(1) == target).sum(), len(target))
    return accuracy.mean()


def main():
    args = parser.parse_args()
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda", hvd.local_rank())
    torch.manual_seed(args.seed + hvd.rank())

    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    train_set = datasets.ImageFolder(args.train_dir, transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize]))
    val_set = datasets.ImageFolder(args.val_dir, transforms.Compose([
        transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]))
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=4)
    share = Subset(val_set, range(hvd.rank(), len(val_set), hvd.size()))
    val_loader = DataLoader(share, batch_size=args.val_batch_size, num_workers=4)

    model = models.vgg16(num_classes=len(train_set.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9, weight_decay=args.wd)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: lr_factor(e, args.warmup_epochs))

    first = 0
    path = os.path.join(args.log_dir, "checkpoint.pt")
    if hvd.rank() == 0:
        os.makedirs(args.log_dir, exist_ok=True)
        if os.path.exists(path):
            saved = torch.load(path, map_location=device, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            first = saved["epoch"] + 1
    first = hvd.broadcast_object(first, root_rank=0, name="first")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=0, name="scheduler"))

    for epoch in range(first, args.epochs):
        loss = train(epoch, model, optimizer, train_loader, device)
        accuracy = validate(model, val_loader, device)
        scheduler.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f} accuracy {accuracy:.4f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(), "epoch": epoch}, path)
    hvd.shutdown()


if __name__ == "__main__":
    main()
