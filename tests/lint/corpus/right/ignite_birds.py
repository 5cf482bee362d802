# expect: none
"""Bird species with PyTorch-Ignite; launch with torchrun."""
import argparse
import os
import random

import ignite.distributed as idist
import numpy as np
import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, Loss
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.models import shufflenet_v2_x1_0
from torchvision.transforms import functional as TF

MEAN, STD = [0.485, 0.499, 0.432], [0.229, 0.224, 0.266]


class Birds(Dataset):
    """Crops and flips are drawn with numpy."""

    def __init__(self, root, augment):
        self.files, self.augment = ImageFolder(root), augment

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img, label = self.files[i]
        img = TF.resize(img, [248, 248])
        if self.augment:
            top, left = np.random.randint(0, 25, size=2)
            img = TF.crop(img, int(top), int(left), 224, 224)
            if np.random.rand() < 0.5:
                img = TF.hflip(img)
        else:
            img = TF.center_crop(img, [224, 224])
        return TF.normalize(TF.to_tensor(img), MEAN, STD), label


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def get_loaders(cfg):
    rank, world = idist.get_rank(), idist.get_world_size()
    train = Birds(os.path.join(cfg.root, "train"), augment=True)
    test = Birds(os.path.join(cfg.root, "test"), augment=False)
    sampler = DistributedSampler(train, world, rank, shuffle=True)
    train_loader = DataLoader(train, batch_size=cfg.batch, sampler=sampler, num_workers=cfg.workers,
                              worker_init_fn=seed_worker, drop_last=True)
    test_loader = DataLoader(Subset(test, range(rank, len(test), world)), batch_size=cfg.batch,
                             num_workers=cfg.workers)
    return train_loader, sampler, test_loader, len(train.files.classes)


def make_trainer(model, optimizer, criterion, device):
    def step(engine, batch):
        model.train()
        x, y = batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Engine(step)


def training(local_rank, cfg):
    device = idist.device()
    torch.manual_seed(cfg.seed + idist.get_rank())
    train_loader, sampler, test_loader, classes = get_loaders(cfg)

    model = idist.auto_model(shufflenet_v2_x1_0(num_classes=classes))
    core = model.module if hasattr(model, "module") else model
    optimizer = optim.SGD(model.parameters(), lr=cfg.lr * idist.get_world_size(), momentum=0.9)
    sched = optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs)
    criterion = nn.CrossEntropyLoss()

    trainer = make_trainer(model, optimizer, criterion, device)
    evaluator = create_supervised_evaluator(
        core, metrics={"acc": Accuracy(device=device), "nll": Loss(criterion, device=device)}, device=device)

    @trainer.on(Events.EPOCH_STARTED)
    def reshuffle(engine):
        sampler.set_epoch(engine.state.epoch - 1)

    @trainer.on(Events.EPOCH_COMPLETED)
    def after_epoch(engine):
        sched.step()
        metrics = evaluator.run(test_loader).metrics
        if idist.get_rank() == 0:
            print(f"epoch {engine.state.epoch}: acc {metrics['acc']:.3f} nll {metrics['nll']:.3f}")

    everything = {"trainer": trainer, "model": core, "optimizer": optimizer, "sched": sched}
    saver = Checkpoint(everything, DiskSaver(cfg.out, create_dir=True, require_empty=False), n_saved=2,
                       filename_prefix="birds")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)
    if cfg.resume:
        Checkpoint.load_objects(everything, torch.load(cfg.resume, map_location=device, weights_only=True))
    if idist.get_rank() == 0:
        ProgressBar().attach(trainer)
    trainer.run(train_loader, max_epochs=cfg.epochs)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--out", default="birds_out")
    ap.add_argument("--resume")
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--batch", type=int, default=32, help="per process")
    ap.add_argument("--workers", type=int, default=4, help="per process")
    ap.add_argument("--lr", type=float, default=0.01, help="per process, multiplied by their number")
    ap.add_argument("--seed", type=int, default=40)
    cfg = ap.parse_args()
    idist.initialize("nccl")
    training(idist.get_local_rank(), cfg)
    idist.finalize()


if __name__ == "__main__":
    main()
