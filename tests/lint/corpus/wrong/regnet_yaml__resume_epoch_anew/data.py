# expect: none
from pathlib import Path

from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

STATS = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def pipeline(train, size):
    if train:
        ops = [T.RandomResizedCrop(size), T.RandomHorizontalFlip(), T.ColorJitter(0.3, 0.3, 0.3)]
    else:
        ops = [T.Resize(int(size * 1.14)), T.CenterCrop(size)]
    return T.Compose(ops + [T.ToTensor(), T.Normalize(**STATS)])


def build_loaders(cfg, rank, world):
    root = Path(cfg["root"])
    fit_set = ImageFolder(root / "train", pipeline(True, cfg["size"]))
    val_set = ImageFolder(root / "val", pipeline(False, cfg["size"]))

    fit_sampler = DistributedSampler(fit_set, num_replicas=world, rank=rank, shuffle=True, drop_last=True)
    fit = DataLoader(fit_set, batch_size=cfg["batch_per_gpu"], sampler=fit_sampler, drop_last=True,
                     num_workers=cfg["workers_per_gpu"], pin_memory=True)
    # every image goes to exactly one rank
    mine = Subset(val_set, range(rank, len(val_set), world))
    val = DataLoader(mine, batch_size=2 * cfg["batch_per_gpu"],
                     num_workers=cfg["workers_per_gpu"], pin_memory=True)
    return {"fit": fit, "val": val}
